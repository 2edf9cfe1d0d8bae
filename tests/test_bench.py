"""The benchmarks at toy size: that they run and compare what they say."""

import copy
import json
import math
import shutil
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import dolls
import toys
from bench import demo, grpo_step, repro, threads
from bench import run as bench_run
from clinrl.config.params import load_params
from clinrl.models import bases
from clinrl.training import launch

LINEAR = {"self_attn.q_proj": (8, 8), "mlp.down_proj": (8, 16)}
TOYS = {
    "audit_env": {"EPISODES": 4, "REPEATS": 1},
    "grpo_loss": {"GROUPS": 4, "LIVE": 1, "SIZE": 2, "PROMPT": 9, "COMPLETION": 5, "ROUNDS": 1},
    "exam": {"CASES": 6, "LOOPED": 2},
    "serve": {"REQUESTS": 4, "CLIENTS": (1, 2)},
    "registry": {"METRICS": 3, "STEPS": 4},
    "commands": {"TIMES": 1},
    "cases": {"SIZES": (200,)},
    "sources": {"ROWS": 400},
    "fold": {
        "LAYERS": (1,),
        "HIDDEN": 8,
        "MLP": 16,
        "VOCAB": 64,
        "HEADS": 2,
        "KV_HEADS": 1,
        "RANK": 2,
        "LINEAR": LINEAR,
    },
}
"""What makes a measurement small, by script: those that print their rows and need nothing but a project."""
ALONE = {"rewards", "threads", "overhead", "grpo_step", "demo", "repro"}
"""Those that have a test of their own."""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with a project whose v2 follows a reward."""
    shutil.copytree(dolls.built(), tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    content = copy.deepcopy(dolls.PARAMS)
    content["profiles"][content["versions"]["v2"]["profile"]]["trainer"]["embedded"]["on_alarm"] = (
        "warn"  # it knows next to nothing
    )
    YAML(typ="safe").dump(content, Path("params.yaml"))
    return tmp_path


def by_name(rows):
    return {what: value for what, value, _unit, _note in rows}


@pytest.mark.slow
def test_a_step_is_compared_with_that_of_a_script(project, monkeypatch):
    monkeypatch.setattr(grpo_step, "MEASURED", "v2")
    with dolls.in_process():
        launch.stage(dolls.params(), "v1")
    (project / "there").mkdir()
    found = by_name(grpo_step.measured(project / "there", steps=3, rounds=1))
    assert next(iter(found)) == "GRPO step against stock TRL"
    ours, theirs = found["GRPO step, clinrl train, shared paths"], found["GRPO step, bare TRL"]
    assert found["GRPO step against stock TRL"] == pytest.approx(ours / theirs, rel=0.05)
    assert 0 < found["GRPO step, arithmetic limit"] < ours
    assert 0 <= found["groups without a signal"] <= 100


def test_waiting_is_compared_with_each_way_alone():
    alone, busy = {threads.OURS: 0.5, threads.OPENMP: 0.4}, {threads.OURS: 1.0, threads.OPENMP: 4.0}
    paired = {threads.OURS: 2.0, threads.ASLEEP: 0.5}
    found = list(by_name(threads.rows(alone, busy, paired)).values())
    assert found == [0.5, 1.25, 2.0, 10.0, 0.25]


def printed(module, capfd):
    """The rows that a measurement prints in this process."""
    capfd.readouterr()
    with dolls.in_process():
        module.main()
    return by_name(json.loads(capfd.readouterr().out.splitlines()[-1]))


@pytest.mark.long
@pytest.mark.parametrize(
    "script", [pytest.param(n, marks=[] if n < "b" or n > "g" else pytest.mark.slow) for n in TOYS]
)
def test_a_measurement_runs_at_toy_size(script, project, monkeypatch, capfd):
    monkeypatch.syspath_prepend(str(bench_run.HERE))
    module = import_module(f"bench.{script}")
    for name, value in TOYS[script].items():
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, value)
    assert all(math.isfinite(value) for value in printed(module, capfd).values())


@pytest.mark.slow
def test_a_reward_that_asks_models_is_measured_with_those_of_the_project(project, monkeypatch, capfd):
    from bench import rewards

    base = toys.PARAMS["bases"]["toy"]
    judges = dict.fromkeys(("judge", "second_judge"), base["embedded"]["judges"]["judge"])
    small = base | {"embedded": base["embedded"] | {"cases": 20, "steps": 4, "judges": judges}}
    content = {name: toys.PARAMS[name] for name in ("scale", "modes")} | {"profiles": {}, "versions": {}}
    data = {"task": "imaging", "task_version": 1, "mix": "reporting", "use": "exam", "cases": 24, "seed": 2}
    YAML(typ="safe").dump(content | {"bases": {"imaging": small}, "datasets": {"x1": data}}, Path("params.yaml"))
    bases.stage(load_params(), "imaging")
    monkeypatch.setattr(rewards, "N", 4)
    found = printed(rewards, capfd)
    assert found["reward of 4 completions, judge cached"] < found["reward of 4 completions, judge asked anew"]


def test_a_demo_is_timed_by_stage(tmp_path, monkeypatch):
    lines = ["installing", "Stage 'params' didn't change, skipping", "Running stage 'train@a':", "> python"]
    lines += ["Running stage 'dataset@x':", "train@a | step 1 took 3.0 s", "dataset@x took 1.5 s"]
    lines += ["Updating lock file", "train@a took 4.0 s", "Use `dvc push`", "| version | exact |"]
    script = "import time\n" + "".join(f"time.sleep(0.02); print({line!r}, flush=True)\n" for line in lines)
    monkeypatch.setattr(demo, "COMMAND", (sys.executable, "-c", script))
    said = list(demo.said(tmp_path))
    assert [line.strip() for _, line in said] == [*lines, ""]
    found = demo.by_stage((float(place), line) for place, line in enumerate([*lines, ""]))
    assert found == {"": 11, "set-up": 1, "dataset@x": 1.5, "train@a": 4, demo.END: 3}
    whole, *parts = demo.rows(found)
    assert whole[:2] == ("make demo, fresh clone", 11)
    assert [part[1] for part in parts] == [1, 1.5, 4, 3]
    monkeypatch.setattr(demo, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(SystemExit, match="ended with 3"):
        list(demo.said(tmp_path))


def test_a_demo_that_changes_what_git_holds_is_told(tmp_path):
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        (tmp_path / "kept").write_text("as it was\n")
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    demo.check_unchanged(tmp_path)
    (tmp_path / "kept").write_text("otherwise\n")
    with pytest.raises(SystemExit, match="kept"):
        demo.check_unchanged(tmp_path)


LOCK = {
    "base@esi": {"outs": [{"path": "data/bases/esi", "md5": "b"}]},
    "dataset@esi-d1": {"outs": [{"path": "data/cases/esi-d1", "md5": "d"}]},
    "train@v1": {
        "deps": [{"path": "data/bases/esi"}, {"path": "data/cases/esi-d1"}],
        "outs": [{"path": "data/adapters/v1", "md5": "v"}],
    },
    "base@audit": {"outs": [{"path": "data/bases/audit", "md5": "a"}]},
}
"""Of a project with two tasks."""


def test_a_whole_task_is_timed_from_nothing_and_goes_on_after_an_interrupt(tmp_path, monkeypatch):
    source, folder, journal = tmp_path / "source", tmp_path / "work", tmp_path / "work.jsonl"
    for path in ("data/bases/esi/model", "data/cases/esi-d1/cases", "data/adapters/v1/adapter", "params.yaml"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text("made\n")
    YAML(typ="safe").dump({"schema": "2.0", "stages": LOCK}, source / "dvc.lock")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=source, check=True)
    repro.begun(tmp_path / "part", ["train@v1"], source)
    left = {path.name for path in (tmp_path / "part").rglob("*") if path.is_file() and ".git" not in path.parts}
    assert left == {"model", "cases", "params.yaml", "dvc.lock"}
    repro.begun(folder, None, source)
    assert [path.name for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts] == ["params.yaml"]

    script = "import sys, time; time.sleep(0.1)\nfor line in sys.argv[2:]: print(line + ' took 1.5 s', flush=True)\n"
    script += "time.sleep(0.1); sys.exit(int(sys.argv[1]))"
    for code, stages in ((3, ["base@esi"]), (0, ["train@v1", "train@v2"])):
        monkeypatch.setattr(repro, "COMMAND", (sys.executable, "-c", script, str(code)))
        with nullcontext() if not code else pytest.raises(SystemExit, match="ended with 3; the same command goes on"):
            repro.spend(folder, stages, journal)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line.get("stage") for line in lines] == ["base@esi", None, "train@v1", "train@v2", None]
    assert sum(line["since_s"] for line in lines) > 0.4
    (_, whole, unit, note), *parts = repro.rows("esi", "all", [line | {"since_s": 60} for line in lines])
    assert (whole, unit, note) == (5, "min", "3 stages, two at once; interrupts: 1")
    assert [part[:2] for part in parts] == [("esi, train", 3), ("esi, base", 1.5)]


def test_what_a_task_has_is_held_against_what_is_recorded():
    assert repro.targets(LOCK, "esi", "*") == ["base@esi", "train@v1"]
    assert repro.targets(LOCK, "esi", "*@v*") == ["train@v1"]
    wanted = repro.lock.outputs(LOCK, ["base@esi", "train@v1"])
    made = wanted | {"data/adapters/v1": "other", "data/bases/audit": "a"}
    assert repro.equal("esi", wanted, made)[1:] == (1, "outputs", "of 2")


@pytest.mark.slow
def test_a_step_beside_busy_processes_is_measured(project):
    assert all(value > 0 for value in by_name(threads.measured(1, 1)).values())


@pytest.mark.long
def test_flows_are_measured_on_the_project_with_some_of_its_versions(tmp_path):
    """By scripts of a folder in which others stand beside them, under names that could hide a package."""
    words = f"import sys; sys.path[0] = {str(bench_run.HERE)!r}; import arms, flows, overhead; print(*flows.__path__);"
    words += f"overhead.project(arms.Path({str(tmp_path / 'a')!r}), arms.ARMS)"
    done = subprocess.run([sys.executable, "-c", words], cwd=bench_run.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(bench_run.ROOT / "flows")]
    found = load_params(tmp_path / "a/params.yaml")
    assert len(found.versions) == 8
    assert {found.lineage(name)[0] for name in found.versions} == {*found.versions}


def test_every_benchmark_is_one_that_runs_by_itself():
    scripts = {path.name for path in bench_run.HERE.glob("*.py")}
    measured = {name.split()[0] for name in bench_run.SCRIPTS + bench_run.BY_NAME}
    assert {f"{name}.py" for name in ALONE | set(TOYS)} == measured - {"arms.py"}
    assert measured <= scripts
    assert scripts - measured == {"run.py", "alarms.py", "judges.py"}  # these write pages of their own
    assert math.isfinite(sum(row["value"] for record in bench_run.recorded().values() for row in record["rows"]))
