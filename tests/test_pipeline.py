"""The pipeline as a whole: dvc.yaml, params.yaml, the command line and the source tree agree with each other."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import forks
import laid
from clinrl import paths
from clinrl.artifacts import md5
from clinrl.cli.parser import parser
from clinrl.config.params import Params, load_params
from clinrl.provenance import dvc_yaml, lock
from clinrl.provenance.stages import FIRST, addresses_of, command_of
from clinrl.runtime import determinism

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(ROOT / "params.yaml")


@pytest.fixture(scope="module")
def index() -> Iterator[Any]:
    """What DVC reads of this project, which takes it seconds."""
    from dvc.repo import Repo

    with Repo(str(ROOT)) as repo:
        yield repo.index


@pytest.fixture(scope="module")
def stages(index: Any) -> dict[str, Any]:
    """Every stage of dvc.yaml with its templates filled in, by address."""
    return {stage.addressing: stage for stage in index.stages}


@pytest.mark.long
def test_no_command_of_the_pipeline_holds_a_name(stages: dict[str, Any]) -> None:
    """DVC hands commands to a shell; `python` is the interpreter that runs DVC."""
    assert {stage.cmd for stage in stages.values()} == {'python -m clinrl stage "$DVC_STAGE"'}
    commands = parser()
    for address in stages.keys() - {FIRST}:
        command, name = command_of(address)
        assert commands.parse_args([command, name]).command == command


def test_every_stage_follows_from_a_params_file_that_was_checked(stages: dict[str, Any]) -> None:
    proof = str(paths.PARAMS_PROOF)
    assert [out.def_path for out in stages[FIRST].outs] == [proof]
    assert {dep.def_path for dep in stages[FIRST].deps} == {"params.yaml", "params"}
    for address in stages.keys() - {FIRST}:
        assert proof in {dep.def_path for dep in stages[address].deps}, address


def test_dvc_reads_every_file_of_parameters() -> None:
    listed = YAML(typ="safe").load(ROOT / "dvc.yaml")["vars"]
    assert sorted(listed) == sorted(f"params/{path.name}" for path in (ROOT / "params").iterdir())


def test_everything_in_params_has_its_stages(params: Params, stages: dict[str, Any]) -> None:
    expected = {f"{group}@{name}" for group in ("base", "baseline") for name in params.bases}
    expected |= {f"{group}@{name}" for group in ("dataset", "validate") for name in params.datasets}
    expected |= {f"{group}@{name}" for group in ("probe", "train", "evaluate") for name in params.versions}
    expected |= {f"{group}@{name}" for group in ("fold", "examine-fold") for name in params.merges.folds}
    expected |= {f"{group}@{name}" for group in ("blend", "examine-blend") for name in params.merges.blends}
    expected |= {f"mine@{name}" for name in params.mining}
    expected |= {f"{group}@{name}" for group in ("import", "validate-import") for name in params.imports}
    expected |= {f"external@{name}" for name in params.external}
    expected |= {f"resit@{name}" for name in params.resits}
    expected |= {f"protocol-base@{name}" for name in params.protocols.bases}
    expected |= {f"protocol@{name}" for name in params.protocols.versions}
    expected |= {f"rival@{name}" for name in params.rivals}
    expected |= {f"compare@{name}" for name in params.comparisons} | {FIRST}
    assert expected == set(stages)


def test_an_artifact_is_a_version_that_the_wheel_ships(stages: dict[str, Any]) -> None:
    artifacts = YAML(typ="safe").load(ROOT / "dvc.yaml")["artifacts"]
    (shipped,) = re.findall(r"^SHIPPED := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert [*artifacts] == shipped.split()
    for name, artifact in artifacts.items():
        assert artifact["path"] in {out.def_path for out in stages[f"train@{name}"].outs}


def test_errors_are_mined_on_no_exam(params: Params, stages: dict[str, Any]) -> None:
    exams = {f"data/cases/{name}" for name, spec in params.all_data.items() if spec.use == "exam"}
    for name, mining in params.mining.items():
        deps = {dep.def_path for dep in stages[f"mine@{name}"].deps}
        assert {f"data/adapters/{name}", f"data/cases/{mining.data}"} <= deps
        assert not deps & exams


def test_a_comparison_follows_from_every_exam_of_its_task(params: Params, stages: dict[str, Any]) -> None:
    """A new version in a comparison is a block of parameters: dvc.yaml names the folder, and DVC who writes into it."""
    for name, comparison in params.comparisons.items():
        stage = stages[f"compare@{name}"]
        folder = paths.exam_record(comparison.task, "x").parent
        deps = {dep.def_path for dep in stage.deps if not hasattr(dep, "params")}
        assert deps == {str(paths.PARAMS_PROOF), str(folder)}
        for version in (f"{comparison.task}-base", *comparison.versions):
            record = str(paths.exam_record(comparison.task, version))
            outs = [out.def_path for out in stages[params.model(version).stage].outs]
            assert record in outs
            assert Path(record).parent == folder
        report = paths.comparison_report(name)
        written = [paths.comparison_pages(name), *map(report.with_suffix, (".json", ".md", ".png"))]
        assert {out.def_path for out in stage.outs} == set(map(str, written))
        tracked = {key for dep in stage.deps for key in getattr(dep, "params", ())}
        assert tracked == {f"comparisons.{name}", "scale", "modes"}


def test_dvc_runs_a_comparison_after_all_exams_of_its_task(params: Params, index: Any) -> None:
    for name, comparison in params.comparisons.items():
        (stage,) = (stage for stage in index.graph if stage.addressing == f"compare@{name}")
        before = {other.addressing for other in index.graph.successors(stage)}
        assert {params.model(version).stage for version in comparison.versions} <= before


@pytest.mark.long
def test_a_record_of_an_exam_says_what_the_lock_says(params: Params) -> None:
    recorded = lock.read(ROOT / "dvc.lock")
    for path in sorted((ROOT / "data/reports/exams").rglob("*.json")):
        record = json.loads(path.read_text())
        assert path == ROOT / paths.exam_record(path.parent.name, record["name"])
        entry = recorded[addresses_of(params, record["name"])["evaluate"]]
        known = {each["path"]: each["md5"] for kind in ("deps", "outs") for each in entry[kind]}
        assert record["md5"] == {used: known[used] for used in record["md5"]}
        assert str(paths.graded(record["name"])) in record["md5"] or record["name"] in params.rivals


def test_a_warm_start_is_an_edge(params: Params, stages: dict[str, Any]) -> None:
    for name, version in params.versions.items():
        deps = {dep.def_path for dep in stages[f"train@{name}"].deps}
        assert {f"data/adapters/{version.parent}", f"data/bases/{version.task}", f"data/cases/{version.data}"} <= deps
        assert f"data/reports/probe/{name}.json" in deps


def test_a_merge_follows_from_its_versions_and_sits_their_exam(params: Params, stages: dict[str, Any]) -> None:
    merges = [("fold", name, [fold.version], fold.exam) for name, fold in params.merges.folds.items()]
    merges += [("blend", name, [b.first, b.second], b.exam) for name, b in params.merges.blends.items()]
    for kind, name, versions, exam in merges:
        deps = {dep.def_path for dep in stages[f"{kind}@{name}"].deps}
        assert {f"data/adapters/{version}" for version in versions} <= deps
        deps = {dep.def_path for dep in stages[f"examine-{kind}@{name}"].deps}
        assert {f"data/merged/{name}", f"data/cases/{exam}", f"data/graded/{versions[0]}"} <= deps


def test_every_mode_has_its_outputs_and_its_prompt_is_tracked(params: Params) -> None:
    text = (ROOT / "dvc.yaml").read_text()
    for mode in params.modes:
        assert f"data/reports/${{key}}/{mode}.json" in text
        assert f"data/reports/${{key}}-base/{mode}.json" in text
        assert f"modes.{mode}.thinking" in text


def test_no_source_file_is_a_dependency(stages: dict[str, Any]) -> None:
    files = [dep.def_path for stage in stages.values() for dep in stage.deps if dep.def_path]
    assert [path for path in files if not path.startswith(("data/", "params.yaml", "params"))] == []


def test_what_git_keeps_and_what_it_ignores() -> None:
    ignored = [
        "data/cases/esi-d3/cases.jsonl",
        "data/adapters/esi-v46/adapter_model.safetensors",
        "data/graded/esi-v46/think.jsonl",
        "data/docs/esi-d3/index.html",
        "data/reports/data/esi-d3.failed.json",
        "data/reports/esi-v46/curves.png",
        "data/reports/esi-v46/predictions_think.csv",
        "mlruns/mlflow.db",
        ".clinrl/plots/index.html",
        ".venv/bin/python",
    ]
    kept = [
        "data/adapters/esi-base/manifest.json",
        "data/bases/esi/model.safetensors",
        "data/reports/esi-v46/summary.json",
        "data/reports/esi-v46/history.csv",
        "data/reports/data/esi-d3.json",
        "dvc.lock",
    ]
    for path in (*ignored, *kept):
        found = subprocess.run(["git", "check-ignore", "-q", "--no-index", path], cwd=ROOT, check=False)
        assert (found.returncode == 0) == (path in ignored), path


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The committed pipeline without its artefacts: what a fresh clone has, as far as DVC is concerned."""
    for name in ("dvc.yaml", "dvc.lock", "params.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("params", "data/reports", "data/bases", "data/adapters/esi-base"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def dvc(where: Path, *arguments: str, code: int = 0) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # the stages say `python`
    return forks.dvc(*arguments, where=where, code=code, DVC_SITE_CACHE_DIR=str(where / "site"), PATH=path)


def changed(where: Path) -> set[str]:
    """Stages whose command, parameters, inputs or outputs are not those of the lock. Absent artefacts do not count."""
    recorded, found, digest = lock.read(where / "dvc.lock"), set(), cache(md5)
    with chdir(where):
        for address, stage in dvc_yaml.read().items():
            entry = recorded.get(address, {"cmd": "", "deps": [], "outs": []})
            held = {part["path"]: part["md5"] for kind in ("deps", "outs") for part in entry.get(kind, [])}
            is_same = (
                entry["cmd"] == stage.command
                and entry.get("params", {}) == {file: values for file, values in stage.params.items() if values}
                and held.keys() == {*stage.deps, *stage.outs}
                and all(digest(Path(path)) == known for path, known in held.items() if Path(path).exists())
            )
            if not is_same:
                found.add(address)
    return found


def changed_by_dvc(where: Path) -> set[str]:
    """The same, asked of DVC."""
    found = set()
    for address, entries in json.loads(dvc(where, "status", "--json")).items():
        for entry in entries:
            states = (
                [state for part in entry.values() for state in part.values()] if isinstance(entry, dict) else [entry]
            )
            if any(state not in ("deleted", "not in cache") for state in states):
                found.add(address)
    return found


def edit(path: Path, change: Any) -> None:
    yaml = YAML()
    content = yaml.load(path)
    change(content)
    yaml.dump(content, path)


@pytest.mark.long
@pytest.mark.parametrize("ask", [changed, pytest.param(changed_by_dvc, marks=pytest.mark.slow)])
def test_the_lock_holds_what_params_ask_for_and_a_new_seed_rebuilds_its_version_and_a_new_reason_nothing(
    copy: Path, params: Params, ask: Callable[[Path], set[str]]
) -> None:
    """The proof of params.yaml, which is a constant, is written anew; no ancestor is, and a child adds its stages."""
    last = list(params.versions)[-1]

    def reason(content: Any) -> None:
        for version in content["versions"].values():
            version["why"] = "another reason"

    def change(content: Any) -> None:
        content["versions"]["esi-v999"] = {**content["versions"][last], "parent": last, "seed": 999}
        content["versions"][last]["seed"] += 1

    if ask is changed_by_dvc:
        dvc(copy, "init", "--no-scm", "--quiet")
    assert ask(copy) == set()  # else the first `make demo` of a new user would change dvc.lock
    for file in (copy / "params").iterdir():
        if "why:" in file.read_text():
            edit(file, reason)
    edit(copy / "params" / f"{params.versions[last].file}.yaml", change)
    assert ask(copy) == {
        FIRST, f"probe@{last}", f"train@{last}", "probe@esi-v999", "train@esi-v999", "evaluate@esi-v999",
    }  # fmt: skip


def few() -> dict[str, Any]:
    """The parameters of one version, as they stand in this project."""
    content = laid.content(ROOT)
    for section, names in {
        "bases": ["esi"],
        "datasets": ["esi-d3", "esi-x3"],
        "versions": ["esi-v43"],
        "profiles": ["esi-distilled"],
        **{section: [] for section in ("comparisons", "mining", "rivals")},
    }.items():
        content[section] = {name: content[section][name] for name in names}
    for section in ("merges", "protocols", "gates", "schedules", "watches", "plans"):
        del content[section]
    full = content["bases"]["esi"]["full"]
    full["recipes"] = {name: held for name, held in full["recipes"].items() if name in content["profiles"]}
    return content


@pytest.mark.long
@pytest.mark.parametrize("command", [["repro"], ["repro", "--keep-going", "dataset"]])
def test_a_name_reaches_neither_a_shell_nor_a_path(command: list[str], tmp_path: Path) -> None:
    """In `dvc repro`; of what one names by hand with --single-item, DVC removes the outputs before it runs anything."""
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(ROOT / "dvc.yaml", project)
    content = few()
    laid.lay(project, content)
    load_params(project / "params.yaml")  # nothing is wrong with them, but
    names = ("x; touch attacked #", "../../mlruns", "../../../outside")
    content["datasets"] = dict.fromkeys(names, content["datasets"]["esi-d3"]) | content["datasets"]
    laid.lay(project, content)

    kept = [project / "mlruns/kept", tmp_path / "outside/kept"]
    for path in kept:
        path.parent.mkdir()
        path.write_text("kept")
    dvc(project, "init", "--no-scm", "--quiet")
    dvc(project, *command, code=255)
    assert all(path.read_text() == "kept" for path in kept)
    assert not list(project.rglob("attacked"))
    assert not (project / "data/cases").exists()


@pytest.mark.long
def test_a_hub_that_is_away_leaves_the_base_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stage that it runs DVC removes the outputs first, unless dvc.yaml says otherwise."""
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    laid.lay(tmp_path, few() | {"scale": "full"})
    kept = [tmp_path / folder / "kept" for folder in (paths.base("esi"), paths.adapter("esi-base"))]
    for path in kept:
        path.parent.mkdir(parents=True)
        path.write_text("kept")
    (tmp_path / "site/repo").mkdir(parents=True)  # DVC would let everybody write there, and a stage refuses that
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    dvc(tmp_path, "init", "--no-scm", "--quiet")
    dvc(tmp_path, "repro", "base@esi", code=255)
    assert (tmp_path / paths.PARAMS_PROOF).exists()  # so it was the base that failed
    assert all(path.read_text() == "kept" for path in kept)


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_checks_params_before_anything_else(target: str) -> None:
    command = ["make", "-C", str(ROOT), "--no-print-directory", "--dry-run", "--old-file=.venv/.installed", target]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # The demo checks beside the process that imports its libraries meanwhile.
    aside = r"PATH=\S+ CLINRL_STARTER=\S+ python -m clinrl\.runtime\.forkserver bash -c '\\\n\s*"
    aside += "python -m clinrl check && exec "
    assert re.match({"test": re.escape(".venv/bin/python -m clinrl check\n"), "demo": aside}[target], said)


@pytest.mark.slow
def test_imports_are_stages_like_any_and_are_never_pushed(copy: Path, tmp_path: Path) -> None:
    source = ROOT / "data/sources/synthetic/MIETIC-validate-samples.csv"

    imports = {"mietic-36": {"task": "esi", "task_version": 2, "use": "exam", "source": str(source)}}

    def change(content: Any) -> None:
        content["external"] = {"esi-v49": {"task": "esi", "data": "mietic-36"}}

    edit(copy / "params/esi.yaml", lambda content: content.update(imports=imports))
    edit(copy / "params.yaml", change)
    (copy / "site").mkdir(mode=0o700, exist_ok=True)  # DVC would open it to the group, and a stage refuses that
    dvc(copy, "init", "--no-scm", "--quiet")
    new = {"import@mietic-36", "validate-import@mietic-36", "external@esi-v49"}
    assert changed_by_dvc(copy) == {FIRST, *new}
    dvc(copy, "repro", "validate-import@mietic-36")
    assert changed_by_dvc(copy) == {"external@esi-v49"}
    record = json.loads((copy / "data/reports/data/mietic-36.json").read_text())
    assert record["import"]["kept"] == 36
    dvc(copy, "remote", "add", "--default", "there", str(copy / "remote"))
    dvc(copy, "push", "validate-import@mietic-36", "import@mietic-36")
    assert not [path for path in (copy / "remote").rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.skipif(not determinism.X86, reason="bytes are promised on x86-64 processors")
def test_a_version_trained_by_imitation_is_that_of_the_lock_on_a_processor_of_any_maker(copy: Path) -> None:
    """By imitation: GRPO asks MKL for square roots, which begin with an estimate that each maker's processors give."""
    recorded = lock.read(copy / "dvc.lock")["train@esi-v43"]
    (copy / "site").mkdir(mode=0o700)  # DVC would open it to the group, and a stage refuses that
    dvc(copy, "init", "--no-scm", "--quiet")
    dvc(copy, "repro", "--no-run-cache", "train@esi-v43")
    assert lock.read(copy / "dvc.lock")["train@esi-v43"] == recorded
