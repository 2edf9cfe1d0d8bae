"""The registry on MLflow's own SQLite store: all is there once, whatever happened before, and bad input is not."""

import errno
import json
import multiprocessing
import os
import shutil
import sqlite3
from contextlib import chdir, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

import dolls
import exhibits
import locks
import trackers
from clinrl import paths
from clinrl.artifacts import (
    PICKLES,
    canonical_json,
    exclusive,
    identity,
    read_manifest,
    seal,
    sha256_file,
    verified,
    write_json,
)
from clinrl.config.params import load_params
from clinrl.errors import ArtefactError, Busy, ParamsError, RegistryError, SignatureError
from clinrl.evaluation import answers, recount
from clinrl.evaluation.answers import load_report
from clinrl.registry import log_run, model_folder, pyfunc, versions
from clinrl.registry.versions import entries, find, holder, point, register, tag
from clinrl.release.standing import is_registered
from clinrl.signing import keys
from clinrl.signing.keys import keyring, signer
from clinrl.tracking import mlflow_store
from clinrl.tracking.mlflow_store import connect
from processes import as_reader, free_port

pytestmark = pytest.mark.usefixtures("few_draws")

HOSTILE = ["../v1", "v1; rm -rf .", "v1'", "V1", "", "v1\n", "a" * 60, "$(id)"]


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A store with its tables and nothing else."""
    folder = tmp_path_factory.mktemp("empty")
    with chdir(folder), connect():
        pass
    return folder / mlflow_store.STORE


@pytest.fixture(scope="module")
def held(tmp_path_factory, empty):
    """A project whose v1 is registered. Only copy it."""
    folder = tmp_path_factory.mktemp("held")
    begin(folder, empty)
    with chdir(folder):
        register(exhibits.params(), "v1")
    return folder


@pytest.fixture(scope="module")
def registered(tmp_path_factory, held):
    """A project whose versions and fold are registered. Only read it."""
    folder = tmp_path_factory.mktemp("registered")
    shutil.copytree(held, folder, dirs_exist_ok=True)
    with chdir(folder):
        for name in ("v2", exhibits.FOLDED):
            register(exhibits.params(), name)
    return folder


@pytest.fixture
def shown(registered, monkeypatch):
    """The registered project, entered."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(registered)
    return exhibits.params()


@pytest.fixture
def project(tmp_path, empty, monkeypatch):
    """A project in which nothing is registered, entered."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    begin(tmp_path, empty)
    monkeypatch.chdir(tmp_path)
    return exhibits.params()


@pytest.fixture
def first(project, held):
    """The entry of v1 in the project, where it was registered.

    Not for tests that send files of a run: MLflow remembers where its artefacts lie, by its number."""
    for part in ("mlruns", ".clinrl"):
        shutil.copytree(held / part, part, dirs_exist_ok=True)
    return find("esi", "v1")


READS = """
from pathlib import Path
from clinrl.errors import RegistryError
from clinrl.registry import versions
from clinrl.tracking import mlflow_store
entry = versions.find("esi", "v1")
with mlflow_store.connect() as client:
    folder = versions._folder(client, entry, Path())
print(entry.number, entry.digest, folder, sep="\\n")
try:
    versions.point("esi", "champion", entry)
except RegistryError as error:
    print(error)
"""


def begin(folder, store):
    shutil.copytree(exhibits.built(), folder, dirs_exist_ok=True)
    (folder / mlflow_store.STORE).parent.mkdir()
    shutil.copyfile(store, folder / mlflow_store.STORE)


def sealed_again(folder):
    """Make the manifest of a folder fit the files that it holds now."""
    fields = read_manifest(folder).model_dump()
    del fields["files"]
    seal(folder, **fields)


def run_of(entry):
    with connect() as client:
        return client.get_run(entry.run_id)


def details_of(entry):
    """The run below an entry's, or None."""
    with connect() as client:
        run = client.get_run(entry.run_id)
        found = client.search_runs([run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{entry.run_id}'")
    assert len(found) < 2
    return found[0] if found else None


def metrics_of(entry):
    """Every metric of an entry's run and of the one below it."""
    below = details_of(entry)
    return run_of(entry).data.metrics | (below.data.metrics if below else {})


def history_of(entry, metric):
    with connect() as client:
        runs = [run for run in (run_of(entry), details_of(entry)) if run]
        return [
            (point.step, point.value) for run in runs for point in client.get_metric_history(run.info.run_id, metric)
        ]


def artefacts_of(entry):
    """Every file of an entry's run, as its store lists them."""
    with connect() as client:

        def below(folder):
            for found in client.list_artifacts(entry.run_id, folder):
                yield from below(found.path) if found.is_dir else [found.path]

        return set(below(None))


def logged_models(entry):
    """The logged models with an entry's digest."""
    with connect() as client:
        experiment = client.get_run(entry.run_id).info.experiment_id
        return client.search_logged_models([experiment], filter_string=f"tags.digest = '{entry.digest}'")


def folder_of(entry):
    """Where the files of a registered version lie."""
    (model,) = logged_models(entry)
    return Path(urlsplit(model.artifact_location).path)


@pytest.mark.long
def test_a_version_says_where_it_comes_from(shown):
    entry = find("esi", "v2")

    manifest, report = read_manifest(paths.adapter("v2")), exhibits.reports("v2")["think"]
    assert (entry.model, entry.number, entry.name) == ("esi", 2, "v2")
    assert entry.digest == identity(manifest)
    assert entry.tags == {
        "version": "v2", "parent": "v1", "digest": entry.digest, "parent_digest": manifest.inputs["parent"],
        "base_digest": manifest.inputs["base"], "data_digest": manifest.inputs["data"],
        "exam_digest": report["exam_digest"], "git_revision": "unknown", "dvc_stage": "train@v2", "task_version": "2",
        "scale": "embedded",
        "examined": versions.reports_digest({mode: load_report("v2", mode) for mode in ("think", "direct")}),
        "alarms": "stop first_kl at 1; warn kl at 1; stop not_finite kl at 2",
    }  # fmt: skip
    assert manifest.inputs["parent"] == find("esi", "v1").digest
    assert [(known.number, known.name) for known in entries("esi")] == [(1, "v1"), (2, "v2")]


@pytest.mark.long
def test_a_placebo_is_a_tag_of_the_version_and_noted_of_what_is_made_of_it(project):
    made = log_run.collect(project, project.model("v1"))
    assert not {"placebo", "waiver"} & versions._tags(made).keys()
    stated = {"placebo": "random", "waiver": "A control."}
    assert versions._tags(replace(made, tags=stated)).items() >= stated.items()
    manifest = paths.adapter("v1") / "manifest.json"
    content = json.loads(manifest.read_text())
    write_json(manifest, content | {"spec": content["spec"] | {"placebo": "random"}})
    assert log_run.stated(project, exhibits.FOLDED, "placebo") == "random"
    assert log_run.stated(project, "v2", "placebo") == "random", "it starts from v1"
    shutil.rmtree(manifest.parent)
    assert log_run.stated(project, "v2", "placebo") == ""
    name = project.versions["v1"].profile
    recipe = project.profiles[name].model_copy(update={"waiver": "w"})
    waived = project.model_copy(update={"profiles": {**project.profiles, name: recipe}})
    assert log_run.stated(waived, "v2", "waiver") == "w"


@pytest.mark.long
def test_a_full_model_has_a_registered_model_of_its_own(shown):
    entry = find("esi-merged", exhibits.FOLDED)
    assert (entry.number, entry.aliases, entry.tags["dvc_stage"]) == (1, ("candidate",), f"fold@{exhibits.FOLDED}")
    assert (entry.tags["parent"], entry.tags["parent_digest"]) == ("v1", find("esi", "v1").digest)
    assert "data_digest" not in entry.tags


def test_a_run_holds_every_metric_of_both_modes_with_its_interval(shown):
    metrics = metrics_of(find("esi", "v2"))
    for mode, report in exhibits.reports("v2").items():
        for name, estimate in report["metrics"].items():
            assert metrics[f"{mode}/{name}"] == estimate["value"]
            assert metrics[f"{mode}/{name}.low"] == estimate["low"]
            assert metrics[f"{mode}/{name}.high"] == estimate["high"]
            assert metrics[f"{mode}/{name}.n"] == estimate["n"]
        assert metrics[f"{mode}/reward"] == report["reward"]
        assert metrics[f"{mode}/terms/level"] == report["terms"]["level"]
    assert metrics["mode_agreement"] == 1.0
    assert metrics["mode_agreement.n"] == 10


def test_a_run_opens_on_reward_and_headline_and_has_the_rest_below_it(shown):
    entry = find("esi", "v2")
    run, below = run_of(entry), details_of(entry)
    headline = {"reward", "exact", "critical_under", "adjacent", "dangerous"}
    exam = {f"{mode}/{name}" for mode in ("think", "direct") for name in headline} | {"mode_agreement"}
    assert run.data.metrics.keys() == exam | {"reward"}
    assert not run.data.metrics.keys() & below.data.metrics.keys()
    assert (below.info.status, below.info.run_name) == ("FINISHED", "v2, all metrics")
    assert "in the run below this one" in run.data.tags["mlflow.note.content"]
    with connect() as client:
        kind = client.get_experiment(run.info.experiment_id).tags["mlflow.experimentKind"]
    assert kind == "custom_model_development"
    (model,) = logged_models(entry)
    assert {metric.key: metric.value for metric in model.metrics} == {name: run.data.metrics[name] for name in exam}
    assert {(metric.dataset_name, metric.run_id) for metric in model.metrics} == {("x1", entry.run_id)}
    assert model.params == run.data.params


@pytest.mark.long
def test_what_was_registered_with_all_metrics_in_one_run_stays_so(project, monkeypatch):
    """As versions were registered before most metrics moved below: nothing moves, and what models lacked is added."""
    with monkeypatch.context() as before:
        before.setattr(log_run, "belongs_in", lambda *_: True)
        before.setattr(log_run, "_log_model", lambda *_: None)
        first = register(project, "v1")
    held = run_of(first).data.metrics
    assert "think/exact.low" in held

    assert register(project, "v1") == first
    assert (run_of(first).data.metrics, details_of(first)) == (held, None)
    assert history_of(first, "think/exact") == [(0, held["think/exact"])]
    (model,) = logged_models(first)
    assert {"think/exact": held["think/exact"]}.items() <= {one.key: one.value for one in model.metrics}.items()
    assert pyfunc.read(folder_of(first)).name == "v1"


def test_a_run_holds_the_training_history_by_step_and_the_recipe(shown):
    entry = find("esi", "v2")
    run = run_of(entry)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "v2"
    assert history_of(entry, "loss") == [(step, 1.0 / step + 2) for step in (1, 2, 3)]
    assert history_of(entry, "kl") == [(1, 0.1), (3, 0.1)]
    assert run.data.params["trainer.steps"] == "8"
    assert run.data.params["reward.kind"] == "asymmetric"
    assert run.data.params["environment.kernels"] == "avx2"


def test_a_run_names_its_data_sets_by_their_digests(shown):
    inputs = {held.dataset.name: held for held in run_of(find("esi", "v1")).inputs.dataset_inputs}
    assert set(inputs) == {"d1", "x1"}
    for name, context in (("d1", "training"), ("x1", "exam")):
        whole = identity(read_manifest(paths.cases(name)))
        assert [(held.key, held.value) for held in inputs[name].tags] == [("mlflow.data.context", context)]
        assert inputs[name].dataset.digest == whole[:36]
        assert json.loads(inputs[name].dataset.profile) == {"digest": whole}


def test_a_run_holds_reports_plots_card_and_pages_of_validation(shown):
    files = artefacts_of(find("esi", "v1"))
    assert {
        "reports/think.json", "reports/direct.json", "reports/report.md", "reports/confusion_think.png",
        "README.md", "reports/curves.png", "training/README.md", "training/history.jsonl", "training/manifest.json",
        "proofs/v1.json", "proofs/d1.json", "proofs/x1.json", "data_docs/d1/index.html", "data_docs/x1/index.html",
    } <= files  # fmt: skip


def test_a_clone_has_proofs_without_pages_and_registers_pages_all_the_same(project):
    shutil.rmtree(paths.data_docs("d1"))
    files = artefacts_of(register(project, "v1"))
    assert {name.split("/")[1] for name in files if name.startswith("data_docs/")} == {"d1", "x1"}
    assert "d1: all rules hold" in (paths.data_docs("d1") / "index.html").read_text(encoding="utf-8")


def test_what_is_registered_is_complete_and_checks_itself(shown):
    adapter = {"adapter", "base", "README.md"}  # the fold of this project has no card to begin with
    for entry, parts in ((find("esi", "v1"), adapter), (find("esi-merged", "1"), {"merged"})):
        folder = folder_of(entry)
        held = {path.name for path in folder.iterdir()}
        assert held == parts | {
            "MLmodel", "code", "served.json", "requirements.txt", "python_env.yaml", "input_example.json",
            "serving_input_example.json", "model.sig", "signer.pub", "bom.cdx.json", "examined.json",
        }  # fmt: skip
        assert model_folder.check_signature(folder, keyring()) == "this checkout"
        if "README.md" in parts:
            card = (folder / "README.md").read_text()
            assert "| v1 | d1 | synthetic, drawn from templates | severe_pain: 0.5 |" in card
            assert "- Training with other seeds: not done" in card
            assert "## Slices" in card
        record = pyfunc.read(folder)
        assert (record.name, record.digest) == (entry.name, entry.digest)
        assert record.modes["think"].model_dump() == exhibits.reports(entry.name)["think"]["mode_spec"]
        assert record.default_mode == "direct"
        assert (folder / "code/clinrl/registry/pyfunc.py").read_bytes() == Path(pyfunc.__file__).read_bytes()
        assert not any(path.suffix in PICKLES for path in folder.rglob("*"))


def test_a_version_is_found_by_alias_name_and_number(shown):
    assert find("esi", "candidate") == find("esi", "v2") == find("esi", "2") == holder("esi", "candidate")
    assert holder("esi", "champion") is None
    assert holder("nothing", "champion") is None
    assert entries("nothing") == []


def test_what_is_not_there_is_refused_with_what_is(shown):
    with pytest.raises(RegistryError, match=r"esi has no 'candidates'; did you mean candidate\? allowed: 1, 2, "):
        find("esi", "candidates")
    with pytest.raises(RegistryError, match=r"no model nothing is registered in .*mlflow.db; run `clinrl register`"):
        find("nothing", "champion")
    with pytest.raises(RegistryError, match="has no '7'"):
        find("esi", "7")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_is_none_reaches_neither_a_path_nor_the_store(shown, name):
    for attempt in (
        lambda: register(shown, name),
        lambda: entries(name),
        lambda: find(name, "champion"),
        lambda: find("esi", name),
        lambda: holder("esi", name),
        lambda: point("esi", name, None),
    ):
        with pytest.raises(RegistryError, match="names match"):
            attempt()


def test_a_name_that_params_does_not_have_is_refused(shown):
    with pytest.raises(ParamsError, match="'v9' is neither a version, a merge nor the base"):
        register(shown, "v9")
    with pytest.raises(RegistryError, match="esi-base is a base; versions and merges are registered"):
        register(shown, "esi-base")


def test_registering_again_adds_nothing(project, first):
    files, before = artefacts_of(first), run_of(first)

    below, (model,) = details_of(first), logged_models(first)

    assert register(project, "v1") == first
    assert len(entries("esi")) == 1
    (again,) = logged_models(first)
    assert (again.metrics, again.params) == (model.metrics, model.params)
    assert details_of(first).data.metrics == below.data.metrics
    assert artefacts_of(first) == files
    after = run_of(first)
    assert (after.data.metrics, after.data.params, after.data.tags) == (
        before.data.metrics, before.data.params, before.data.tags,
    )  # fmt: skip
    assert history_of(first, "loss") == [(step, 1.0 / step + 1) for step in (1, 2, 3)]
    assert len(history_of(first, "think/exact")) == 1
    assert len(after.inputs.dataset_inputs) == 2
    assert len(after.outputs.model_outputs) == 1


@pytest.mark.long
def test_a_copy_of_the_project_elsewhere_is_the_same_version(project, tmp_path_factory, monkeypatch):
    first = register(project, "v1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store.store())
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree("data", elsewhere / "data")
    shutil.copy("dvc.lock", elsewhere)
    monkeypatch.chdir(elsewhere)

    assert register(project, "v1") == first
    assert entries("esi") == [first]
    assert not (elsewhere / "mlruns").exists()


@pytest.mark.long
def test_a_store_that_was_moved_with_its_artefacts_is_whole_at_its_new_place(
    project, first, tmp_path_factory, monkeypatch
):
    versions.point("esi", "champion", first)
    old, new = Path.cwd(), tmp_path_factory.mktemp("moved") / "here"
    shutil.move(old, new)
    monkeypatch.chdir(new)

    entry = find("esi", "champion")

    assert (entry.digest, entry.number) == (first.digest, 1)
    assert folder_of(entry).is_relative_to(new)
    assert (folder_of(entry) / "adapter/adapter_model.safetensors").exists()
    assert "README.md" in artefacts_of(entry)
    assert register(project, "v1").number == 1
    assert register(project, "v2").number == 2
    assert not old.exists()


def test_a_copied_store_is_one_of_its_own(project, first, tmp_path_factory, monkeypatch):
    copy = tmp_path_factory.mktemp("copied") / "here"
    shutil.copytree(Path.cwd(), copy)
    with chdir(copy):
        assert folder_of(find("esi", "v1")).is_relative_to(copy)
    assert not folder_of(first).is_relative_to(copy)


def test_a_file_that_was_altered_in_a_copied_store_is_put_back_there(project, first):
    exhibits.change(folder_of(first) / "adapter/adapter_model.safetensors")
    register(project, "v1")
    versions.check_intact(project, first)


@pytest.mark.long
def test_who_may_read_a_copied_store_and_not_write_it_is_answered(project, first, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copied") / "here"
    shutil.copytree(Path.cwd(), copy)
    before = (copy / mlflow_store.STORE).read_bytes()
    done = as_reader(copy, READS)
    assert done.returncode == 0, done.stderr
    number, digest, folder, refused = done.stdout.splitlines()
    assert (number, digest, Path(folder).is_relative_to(copy)) == ("1", first.digest, True)
    assert refused == (
        f"the registry in {copy / mlflow_store.STORE} may only be read by you; give the command as a user who may "
        "write it and its folder"
    )
    assert (copy / mlflow_store.STORE).read_bytes() == before


@pytest.mark.long
def test_a_store_that_was_moved_before_the_first_registration_takes_it(project, tmp_path_factory, monkeypatch):
    """As after `make demo`: its trainings have runs, and no artefacts yet."""
    manifest = read_manifest(paths.adapter("v1"))
    with connect() as client:
        mlflow_store.run_of(client, "esi", mlflow_store.run_key(manifest), "v1")
    new = tmp_path_factory.mktemp("moved") / "here"
    shutil.move(Path.cwd(), new)
    monkeypatch.chdir(new)
    assert folder_of(register(project, "v1")).is_relative_to(new)


@pytest.mark.long
def test_what_live_metrics_missed_is_filled_in_once(project):
    manifest = read_manifest(paths.adapter("v1"))
    with connect() as client:
        run = mlflow_store.run_of(client, "esi", mlflow_store.run_key(manifest), "v1")
        mlflow_store.log_points(client, run.info.run_id, [("loss", 2, 1.5)])

    entry = register(project, "v1")

    assert entry.run_id == run.info.run_id
    assert sorted(history_of(entry, "loss")) == [(1, 2.0), (2, 1.5), (3, 1.0 / 3 + 1)]
    assert run_of(entry).info.status == "FINISHED"


def test_a_registration_that_was_killed_is_completed(project):
    with connect() as client:
        run = mlflow_store.run_of(client, "esi", mlflow_store.run_key(read_manifest(paths.adapter("v1"))), "v1")
        digest = identity(read_manifest(paths.adapter("v1")))
        half = client.create_logged_model(run.info.experiment_id, name="v1", tags={"digest": digest})
        client.log_model_artifact(half.model_id, str(paths.adapter("v1") / "README.md"), "adapter")
    write_json(Path(".clinrl/registry/v1/left.json"), {})

    entry = register(project, "v1")

    (model,) = logged_models(entry)
    assert (model.model_id, str(model.status)) == (half.model_id, "READY")
    assert pyfunc.read(folder_of(entry)).name == "v1"
    assert not (folder_of(entry) / "left.json").exists()
    assert not any(Path(".clinrl/registry").iterdir())


@pytest.mark.long
def test_a_file_that_was_altered_in_the_store_is_put_back(project, monkeypatch, capfd):
    first = register(project, "v1")
    weights = folder_of(first) / "adapter/adapter_model.safetensors"
    exhibits.change(weights)
    with pytest.raises(
        SignatureError, match=r"adapter_model.safetensors' of .* was altered after this checkout signed"
    ):
        model_folder.check_signature(folder_of(first), keyring())
    with pytest.raises(SignatureError, match="signed it; `clinrl register v1` puts the files"):
        versions.check_intact(project, first)

    def copyfile(source, target, **how):
        if "mlruns" in str(target):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
        return copied(source, target, **how)

    copied = shutil.copyfile
    with monkeypatch.context() as full:
        full.setattr(shutil, "copyfile", copyfile)
        with pytest.raises(OSError, match="No space left on device"):
            register(project, "v1")
    assert weights.exists()
    assert register(project, "v1") == first
    assert sha256_file(weights) == verified(paths.adapter("v1")).files["adapter_model.safetensors"]
    assert "is the champion" not in capfd.readouterr().err
    point("esi", "champion", first)
    exhibits.change(weights)
    register(project, "v1")
    assert f"signed with {signer('embedded').key.fingerprint}, and a server that does not" in capfd.readouterr().err
    register(project, "v1")
    assert "is the champion" not in capfd.readouterr().err


@pytest.fixture
def server(project, tmp_path_factory, monkeypatch):
    """The folder of a real server, which is the project's registry and keeps the files."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    with trackers.serving(folder, port):
        yield folder


def altered(folder):
    exhibits.change(folder / "adapter/adapter_model.safetensors")


def cut_short(folder):
    (folder / "served.json").unlink()


def added(folder):
    (folder / "code/sitecustomize.py").write_text("mine")


def emptied(folder):
    shutil.rmtree(folder)


def rotated(_folder):
    """The key that signed it is another one's by now."""
    shutil.rmtree(keys.FOLDER)
    keys.init()


@pytest.mark.slow
def test_what_a_server_holds_and_is_refused_is_sent_anew_and_nothing_else_is(project, server):
    first = register(project, "v1")
    (folder,) = server.glob("artifacts/*/models/*/artifacts")

    def stamps():
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}

    sent = stamps()
    assert register(project, "v1") == first
    assert stamps() == sent
    for happened in (altered, cut_short, added, emptied, rotated):
        happened(folder)
        with pytest.raises((SignatureError, RegistryError)):
            versions.check_intact(project, first)

        assert register(project, "v1") == first, happened
        versions.check_intact(project, first)
        assert stamps().keys() == sent.keys(), happened
    assert keyring()["this checkout"].line == (folder / "signer.pub").read_text().strip()


@pytest.mark.slow
def test_what_a_full_model_is_made_of_is_read_of_its_manifest_alone(project, server, tmp_path):
    """At full scale the rest is many gigabytes."""
    entry = register(project, exhibits.FOLDED)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with connect() as client:
        folder = versions._folder(client, entry, scratch, "merged/manifest.json")
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["manifest.json"]
    assert versions.made_of(entry) == read_manifest(paths.merged(exhibits.FOLDED)).inputs


@pytest.mark.slow
def test_nothing_is_removed_where_the_store_of_a_server_leads_if_that_is_no_models_folder(
    project, server, tmp_path_factory
):
    register(project, "v1")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "kept").write_text("mine")
    with closing(sqlite3.connect(server / "mlflow.db")) as store, store:
        store.execute("UPDATE logged_models SET artifact_location = ?", (elsewhere.as_uri(),))
    with pytest.raises(RegistryError, match="which is not its folder: it was edited; restore it"):
        register(project, "v1")
    assert [path.name for path in elsewhere.iterdir()] == ["kept"]


def test_the_files_of_a_server_are_removed_under_the_id_of_a_model_alone(tmp_path):
    """A store may name as a model the folder in which an experiment's models lie."""
    kept = tmp_path / "models/artifacts/kept"
    write_json(kept, {})
    model = SimpleNamespace(model_id="models", artifact_location=kept.parent.as_uri())
    with pytest.raises(RegistryError, match="which is not its folder: it was edited; restore it"):
        model_folder._remove(SimpleNamespace(tracking_uri="http://localhost:5000"), model)
    assert kept.exists()


@pytest.mark.parametrize("scheme", ["mlflow-artifacts://", "http://", "https://ada:secret@", "Runs:/", "models:/"])
def test_no_other_host_is_sent_the_password_of_a_server(scheme):
    client = SimpleNamespace(tracking_uri="http://ada:secret@mlflow.example:5000")
    model = SimpleNamespace(artifact_location=f"{scheme}evil.example/1/models/m-1/artifacts")
    run = SimpleNamespace(info=SimpleNamespace(artifact_uri=model.artifact_location))
    made = SimpleNamespace(model=SimpleNamespace(name="v1", data=None, exam=None, folder=Path()))
    for ask in (lambda: model_folder.own_folder(client, model), lambda: log_run._log_files(client, run, made)):
        with pytest.raises(RegistryError, match="where its password would be sent") as refused:
            ask()
        assert "secret" not in str(refused.value)
    for own in ("mlflow-artifacts:/1/a", "mlflow-artifacts://mlflow.example:5000/1/a", "s3://clinrl/1/a"):
        assert model_folder.own_folder(client, SimpleNamespace(artifact_location=own)) is None


def test_nothing_is_written_or_removed_where_an_edited_store_leads(project, tmp_path_factory):
    register(project, "v1")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "kept").write_text("mine")
    dolls.examine(exhibits.params(), "v1", [5])  # so that files of the run are to be sent again
    locks.record(project)
    sound = mlflow_store.STORE.read_bytes()
    for table, name in (("logged_models", "artifact_location"), ("runs", "artifact_uri")):
        mlflow_store.STORE.write_bytes(sound)
        with closing(sqlite3.connect(mlflow_store.STORE)) as store, store:
            store.execute(f"UPDATE {table} SET {name} = ?", (elsewhere.as_uri(),))
        with pytest.raises(RegistryError, match=r"which is not in .*artifacts: it was edited"):
            register(project, "v1")
        assert [path.name for path in elsewhere.iterdir()] == ["kept"], table


@pytest.mark.long
@pytest.mark.parametrize("link", ["reports", "reports/report.md", "README.md"])
def test_nothing_is_written_through_a_link_among_the_files_of_a_run(project, tmp_path_factory, link):
    entry = register(project, "v1")
    dolls.examine(exhibits.params(), "v1", [5])
    locks.record(project)
    with connect() as client:
        folder = Path(urlsplit(client.get_run(entry.run_id).info.artifact_uri).path)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.rmtree(folder / "reports")
    (folder / "README.md").unlink()
    (folder / link).parent.mkdir(exist_ok=True)
    (folder / link).symlink_to(elsewhere if link == "reports" else elsewhere / "gone")
    with pytest.raises(RegistryError, match=rf"artifacts/{link} is a link, .*; remove it"):
        register(project, "v1")
    assert not [*elsewhere.iterdir()]
    (folder / link).unlink()
    register(project, "v1")
    assert (folder / "reports/report.md").is_file()


def test_a_version_that_was_registered_through_a_server_is_found_in_its_file(project, first):
    with closing(sqlite3.connect(mlflow_store.STORE)) as store, store:
        store.execute("UPDATE model_versions SET source = (SELECT 'models:/' || model_id FROM logged_models)")
    versions.check_intact(project, find("esi", "v1"))
    with closing(sqlite3.connect(mlflow_store.STORE)) as store, store:
        store.execute("UPDATE model_versions SET source = 'models:/esi/1'")
    with pytest.raises(RegistryError, match="are said to lie in models:/esi/1, which is no logged model"):
        versions.check_intact(project, find("esi", "v1"))


@pytest.mark.slow
def test_a_version_that_was_registered_in_a_file_is_found_through_its_server(project, server):
    first = register(project, "v1")
    with closing(sqlite3.connect(server / "mlflow.db")) as store, store:
        store.execute("UPDATE model_versions SET source = (SELECT artifact_location FROM logged_models)")
    versions.check_intact(project, first)


def test_a_champion_whose_folder_is_elsewhere_is_refused(project, first, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(folder_of(first), elsewhere)
    with closing(sqlite3.connect(mlflow_store.STORE)) as store, store:
        store.execute("UPDATE model_versions SET source = ?", (elsewhere.as_uri(),))
    with pytest.raises(RegistryError, match="it was edited"):
        versions.check_intact(project, find("esi", "v1"))


def test_weights_that_change_while_they_are_registered_are_not_signed(project, monkeypatch):
    weights = paths.adapter("v1") / "adapter_model.safetensors"
    write = pyfunc.write

    def swapped(*arguments, **more):
        write(*arguments, **more)
        exhibits.change(weights)

    monkeypatch.setattr(pyfunc, "write", swapped)
    with pytest.raises(ArtefactError, match="was altered while it was registered"):
        register(project, "v1")
    assert not entries("esi")


def test_a_second_examination_renews_the_numbers_and_nothing_else(project):
    first = register(project, "v1")
    dolls.examine(exhibits.params(), "v1", [5])
    with pytest.raises(ArtefactError, match=r"data/graded/v1 is not what dvc\.lock records of evaluate@v1"):
        register(project, "v1")
    locks.record(project)
    assert not is_registered(project, "v1"), "not with these numbers"

    second = register(project, "v1")

    assert is_registered(project, "v1")
    report = exhibits.reports("v1")["think"]
    assert second.tags.pop("examined") != first.tags.pop("examined")
    assert second == first
    for name, value in (("think/exact", "value"), ("think/exact.low", "low")):
        assert metrics_of(second)[name] == report["metrics"]["exact"][value]
    (model,) = logged_models(second)
    newest = max((one for one in model.metrics if one.key == "think/exact"), key=lambda one: one.timestamp)
    assert newest.value == report["metrics"]["exact"]["value"]
    with connect() as client:
        stored = Path(client.download_artifacts(second.run_id, "reports/think.json"))
    assert json.loads(stored.read_text()) == report
    assert (folder_of(second) / "README.md").read_text() == log_run.collect(project, project.model("v1")).card


def test_equal_numbers_on_another_exam_name_that_exam(project, first):
    made = log_run.collect(project, project.model("v1"))
    reports = {mode: report.model_copy(update={"exam_digest": "f" * 64}) for mode, report in made.reports.items()}
    versions._complete_entry(replace(made, reports=reports))
    (model,) = logged_models(first)
    named = [one.dataset_digest for one in model.metrics if one.key == "think/exact"]
    assert sorted(named) == sorted([identity(read_manifest(paths.cases("x1")))[:36], "f" * 36])


@pytest.mark.parametrize("scale", ["embedded", "full"])
def test_the_decoding_of_every_exam_of_the_project_can_be_registered(scale):
    params = load_params(Path(__file__).parents[2] / "params.yaml").model_copy(update={"scale": scale})
    for task in params.bases:
        for mode in params.modes:
            decoding = answers.decoding(params, mode, task)
            assert pyfunc.Decoding(**decoding).model_dump() == decoding


def test_numbers_from_a_sampler_with_an_identity_follow_from_the_answers(project):
    sampler = {"name": "transformers", "version": "5.23.0", "dtype": "bfloat16"}
    for name, pattern in (("esi-base", [3]), ("v1", [5])):
        dolls.examine(project, name, pattern, sampler)
    assert recount.reports(project, "v1")["think"].sampler == sampler
    page = paths.report("v1") / "think.json"
    page.write_text(page.read_text().replace("bfloat16", "float32"))
    with pytest.raises(ArtefactError, match=r"think\.json says that sampler"):
        recount.reports(project, "v1")


def test_an_adapter_of_links_into_a_cache_is_registered_as_files(project, tmp_path):
    weights = paths.adapter("v1") / "adapter_model.safetensors"
    cached = shutil.move(weights, tmp_path / "cached")
    weights.symlink_to(cached)
    kept = folder_of(register(project, "v1")) / "adapter" / weights.name
    assert (kept.is_symlink(), kept.read_bytes()) == (False, cached.read_bytes())


@pytest.mark.long
def test_an_examination_with_another_decoding_renews_what_is_served(project):
    first = register(project, "v1")
    folder = folder_of(first)
    before = pyfunc.read(folder).modes["think"].max_new_tokens
    think = project.modes["think"]
    budget = {**think.max_new_tokens, "embedded": 99}
    longer = project.model_copy(
        update={"modes": {**project.modes, "think": think.model_copy(update={"max_new_tokens": budget})}}
    )
    dolls.examine(longer, "esi-base", [3])
    dolls.examine(longer, "v1", [5])
    locks.record(longer)
    assert pyfunc.read(folder).modes["think"].max_new_tokens == before != 99
    point("esi", "champion", first)
    with pytest.raises(RegistryError, match="decodes in another way than the approved one"):
        register(longer, "v1")
    assert pyfunc.read(folder).modes["think"].max_new_tokens == before
    point("esi", "champion", None)
    register(longer, "v1")
    assert pyfunc.read(folder).modes["think"].max_new_tokens == 99


@pytest.mark.long
def test_a_folder_with_the_files_of_another_version_is_replaced(project):
    first, second = folder_of(register(project, "v1")), folder_of(register(project, "v2"))
    shutil.rmtree(second)
    shutil.copytree(first, second)
    register(project, "v2")
    assert pyfunc.read(second).name == "v2"


@pytest.mark.long
def test_the_candidate_is_the_newest_that_was_neither_refused_nor_is_the_champion(project, first):
    point("esi", "champion", first)
    point("esi", "candidate", None)
    assert register(project, "v1").aliases == ("champion",)
    second = register(project, "v2")
    assert second.aliases == ("candidate",)
    point("esi", "candidate", None)
    made = log_run.collect(project, project.model("v2"))
    assert versions._complete_entry(replace(made, tags={"waiver": "A control."})).aliases == ()
    tag(second, {"gate": "refused"})
    point("esi", "candidate", None)
    refused = register(project, "v2")
    assert (refused.aliases, refused.tags["gate"]) == ((), "refused")
    point("esi", "previous", first)
    assert holder("esi", "previous") == find("esi", "v1") == find("esi", "champion")


@pytest.mark.parametrize("decided", [{"gate": "refused"}, {"approver": "Ada Lovelace"}])
def test_what_is_decided_while_it_is_registered_again_is_no_candidate(project, first, monkeypatch, decided):
    point("esi", "candidate", None)
    asked = versions._is_next

    def then_decided(*question):
        answer = asked(*question)
        tag(first, decided)
        return answer

    monkeypatch.setattr(versions, "_is_next", then_decided)
    assert register(project, "v1").aliases == ()
    assert holder("esi", "candidate") is None


@pytest.mark.long
def test_an_older_version_that_is_registered_again_is_no_candidate_in_place_of_a_newer_one(project, first):
    """As a retraining does whose run was deleted."""
    register(project, "v2")
    assert register(project, "v1").aliases == ()
    assert holder("esi", "candidate").name == "v2"
    point("esi", "candidate", None)
    tag(first, {"approver": "Ada Lovelace"})  # it was champion, and was perhaps rolled back
    assert register(project, "v1").aliases == ()
    assert holder("esi", "candidate") is None


@pytest.mark.long
def test_a_version_deleted_by_hand_is_not_found_and_may_be_registered_again(project, first):
    with connect() as client:
        client.delete_model_version("esi", "1")

    assert entries("esi") == []
    assert holder("esi", "candidate") is None
    with pytest.raises(RegistryError, match="no model esi is registered"):
        find("esi", "v1")
    for attempt in (lambda: tag(first, {"gate": "passed"}), lambda: point("esi", "champion", first)):
        with pytest.raises(RegistryError, match=r"refused: .*not found"):
            attempt()
    again = register(project, "v1")
    assert (again.digest, again.run_id) == (first.digest, first.run_id)


@pytest.mark.parametrize("is_pointed", [False, True])
def test_the_candidate_before_one_that_was_refused_meanwhile_stays_it_unless_somebody_chose(
    project, first, monkeypatch, is_pointed
):
    point("esi", "candidate", first)
    asked = versions._is_next

    def then_refused(client, entry, aliases):
        answer = asked(client, entry, aliases)
        tag(entry, {"gate": "refused"})
        return answer

    monkeypatch.setattr(versions, "_is_next", then_refused)
    if is_pointed:
        monkeypatch.setattr(versions, "_is_decided", lambda tags: point("esi", "candidate", None) or True)
        monkeypatch.setattr(versions, "_is_next", lambda *_: True)
    register(project, "v2")
    assert getattr(holder("esi", "candidate"), "name", None) == (None if is_pointed else "v1")


def test_other_words_on_a_card_do_not_replace_a_registered_folder(project, first):
    made = log_run.collect(project, project.model("v1"))
    assert model_folder.is_of(folder_of(first), replace(made, card=made.card.replace("## Slices", "## Parts")))
    numbers = made.card.replace("value: ", "value: 1", 1)
    assert numbers != made.card
    assert not model_folder.is_of(folder_of(first), replace(made, card=numbers))


@pytest.mark.long
def test_a_version_whose_logged_model_was_deleted_by_hand_is_to_be_deleted_too(project):
    first = register(project, "v1")
    (lost,) = logged_models(first)
    with connect() as client:
        client.delete_logged_model(lost.model_id)
    for _ in range(2):
        with pytest.raises(RegistryError, match=r"version 1 of esi has .*; delete that version there and give `clinrl"):
            register(project, "v1")
    with connect() as client:
        client.delete_model_version("esi", "1")
    again = register(project, "v1")
    (model,) = logged_models(again)
    with connect() as client:
        assert model.model_id in client.get_model_version("esi", str(again.number)).source


@pytest.mark.long
@pytest.mark.parametrize("is_erased", [False, True])
def test_a_run_deleted_by_hand_is_registered_again_once(project, first, is_erased):
    """A retraining asks whether something is left to be registered, and drafts only if nothing is."""
    assert is_registered(project, "v1")
    (model,) = logged_models(first)
    with connect() as client:
        client.delete_run(first.run_id)
        if is_erased:  # as `mlflow gc` does
            client._tracking_client.store._hard_delete_run(first.run_id)
    assert not is_registered(project, "v1")
    assert register(project, "v1").number == first.number
    assert is_registered(project, "v1")
    with connect() as client:
        run = mlflow_store.finished_run(client, "esi", mlflow_store.run_key(read_manifest(paths.adapter("v1"))))
    assert run.info.run_id != first.run_id
    assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]


@pytest.mark.long
def test_a_model_deleted_by_hand_is_not_found_and_may_be_registered_again(project, first):
    with connect() as client:
        client.delete_registered_model("esi")

    assert holder("esi", "candidate") is None
    with pytest.raises(RegistryError, match="no model esi is registered"):
        find("esi", "candidate")
    with pytest.raises(RegistryError, match=r"refused: .*not found"):
        point("esi", "champion", first)
    again = register(project, "v1")
    assert (again.number, again.digest, again.aliases) == (1, first.digest, ("candidate",))


def test_an_experiment_deleted_by_hand_is_said(project, first):
    with connect() as client:
        client.delete_experiment(client.get_run(first.run_id).info.experiment_id)
    with pytest.raises(RegistryError, match=r"the experiment esi was deleted in .*; restore it there"):
        register(project, "v2")


def test_a_store_whose_artefacts_a_server_keeps_asks_for_the_server(project):
    with connect() as client:
        client.create_experiment("esi", artifact_location="mlflow-artifacts:/1")
    with pytest.raises(RegistryError, match=r"is a server's, which keeps the artefacts of esi; start that server"):
        register(project, "v1")


def test_versions_that_others_registered_by_hand_do_not_count(project, first):
    with connect() as client:
        client.create_model_version("esi", str(Path("elsewhere").absolute()))
    assert [entry.number for entry in entries("esi")] == [1]
    with pytest.raises(RegistryError, match="has no '2'"):
        find("esi", "2")


def test_what_was_not_examined_is_not_registered(project):
    shutil.rmtree(paths.report("v1"))
    with pytest.raises(ArtefactError, match=r"data/reports/v1/.* is not here, though dvc\.lock records it; build it"):
        register(project, "v1")
    assert entries("esi") == []


def test_reports_on_another_adapter_are_refused(project):
    report = exhibits.reports("v1")["direct"]
    write_json(paths.report("v1") / "direct.json", report | {"adapter_digest": "a" * 64})
    with pytest.raises(ArtefactError, match=r"direct\.json is not what dvc\.lock records of evaluate@v1"):
        register(project, "v1")
    locks.record(project)  # whoever can write dvc.lock too
    with pytest.raises(ArtefactError, match=r"direct\.json is about another model than data/graded/v1"):
        register(project, "v1")


def test_a_number_of_a_report_that_does_not_follow_from_its_answers_is_refused_by_name(project):
    report = exhibits.reports("v1")["think"]
    report["metrics"]["dangerous"]["value"] = 0.00125
    write_json(paths.report("v1") / "think.json", report)
    locks.record(project)
    with pytest.raises(ArtefactError, match=r"says that metrics\.dangerous\.value is 0\.00125, but its answers"):
        register(project, "v1")
    assert entries("esi") == []


def test_a_score_that_its_transcript_does_not_earn_is_refused_by_line(project):
    """A folder that vouches for itself: a term and the total of one answer raised, its manifest made to fit."""
    graded = paths.graded("v1")
    first, *rest = (graded / "think.jsonl").read_text().splitlines(keepends=True)
    line = json.loads(first)
    line["score"]["terms"]["level"] += 0.5
    line["score"]["total"] += 0.5
    (graded / "think.jsonl").write_text("".join([f"{canonical_json(line)}\n", *rest]))
    sealed_again(graded)
    locks.record(project)  # whoever can write dvc.lock too
    with pytest.raises(ArtefactError, match=r"think\.jsonl line 1 has another score than its transcript earns"):
        register(project, "v1")
    assert entries("esi") == []


def test_an_altered_adapter_is_not_registered(project):
    exhibits.change(paths.adapter("v1") / "adapter_model.safetensors")
    with pytest.raises(ArtefactError, match=r"data/adapters/v1 is not what dvc\.lock records of train@v1"):
        register(project, "v1")
    locks.record(project)
    with pytest.raises(ArtefactError, match=r"adapter_model.safetensors was altered after it was built"):
        register(project, "v1")
    assert entries("esi") == []


def test_what_a_manifest_does_not_name_is_not_registered(project):
    (paths.adapter("v1") / "extra.txt").write_text("x")
    locks.record(project)
    with pytest.raises(ArtefactError, match=r"extra\.txt is not named in the folder's manifest\.json; remove it"):
        register(project, "v1")


def test_what_could_run_code_when_it_is_loaded_is_not_registered_though_a_manifest_names_it(project):
    (paths.adapter("v1") / "optimizer.pt").write_text("x")
    sealed_again(paths.adapter("v1"))
    locks.record(project)
    with pytest.raises(ArtefactError, match=r"optimizer\.pt could run code when it is loaded; only safetensors"):
        register(project, "v1")
    assert entries("esi") == []


def test_an_adapter_of_another_base_is_not_registered(project):
    write_json(paths.base("esi") / "manifest.json", read_manifest(paths.base("esi")).model_dump() | {"name": "other"})
    locks.record(project)
    with pytest.raises(ArtefactError, match="was made from another base than data/bases/esi now holds"):
        register(project, "v1")


def test_one_name_is_registered_by_one_command_at_a_time(project):
    with exclusive(Path("registry/v1")), pytest.raises(Busy, match="another command is writing registry/v1"):
        register(project, "v1")


@pytest.mark.long
def test_two_machines_that_register_at_once_make_one_version(project, tmp_path_factory, monkeypatch):
    """Forks, which need not import anything: what two processes do in one store is what is looked at."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store.store())
    context = multiprocessing.get_context("fork")
    ready, told = context.Barrier(2), context.SimpleQueue()

    def machine(folder):
        os.chdir(folder)
        ready.wait(timeout=60)
        told.put(register(project, "v1").number)

    machines = []
    for _ in range(2):
        folder = tmp_path_factory.mktemp("machine")
        shutil.copytree("data", folder / "data")
        shutil.copy("dvc.lock", folder)
        machines.append(context.Process(target=machine, args=(folder,)))
        machines[-1].start()
    for one in machines:
        one.join()
    assert [one.exitcode for one in machines] == [0, 0]
    numbers = [told.get() for _ in machines]

    (entry,) = entries("esi")
    assert numbers == [entry.number] * 2
    with connect() as client:
        assert len(client.search_runs([run_of(entry).info.experiment_id])) == 2  # one is below the other
    assert details_of(entry)
    assert len(logged_models(entry)) == 1
    assert history_of(entry, "loss") == [(step, 1.0 / step + 1) for step in (1, 2, 3)]
    assert len(history_of(entry, "think/exact")) == 1
    assert len(run_of(entry).inputs.dataset_inputs) == 2
    assert pyfunc.read(folder_of(entry)).name == "v1"


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "look"), [(mlflow_store, "_runs"), (log_run, "logged_models"), (versions, "_versions")]
)
def test_whoever_comes_second_steps_back(project, first, monkeypatch, module, look):
    real, looks = getattr(module, look), []

    def late(*question):
        """Nothing was there yet when this machine looked first."""
        looks.append(question)
        return [] if len(looks) == 1 else real(*question)

    monkeypatch.setattr(module, look, late)

    second = register(project, "v1")

    assert second == first
    assert len(looks) > 1
    with connect() as client:
        assert len(client.search_runs([run_of(first).info.experiment_id])) == 2
    assert details_of(first)
    assert len(logged_models(first)) == 1
    assert [entry.number for entry in entries("esi")] == [1]


def test_a_name_that_somebody_edited_in_the_registry_chooses_no_place(project, first, tmp_path_factory):
    to, away = tmp_path_factory.mktemp("to"), tmp_path_factory.mktemp("away") / "site-packages"
    copy = versions.checked_copy(project, first.model_copy(update={"name": str(away)}), to)
    assert copy.is_relative_to(to)
    assert not away.exists()
    with connect() as client:
        client.set_model_version_tag("esi", "1", "version", "../v1")
    assert entries("esi") == []


@pytest.mark.parametrize("edited", ["x", "[1]"])
def test_an_edited_note_of_what_was_sent_is_written_anew(project, first, edited):
    before = run_of(first).data.tags[log_run.SENT]
    with connect() as client:
        client.set_tag(first.run_id, log_run.SENT, edited)
    register(project, "v1")
    assert run_of(first).data.tags[log_run.SENT] == before


def test_a_version_is_not_registered_with_other_data_than_it_was_trained_on(project):
    changed = {"v1": project.versions["v1"].model_copy(update={"data": "x1"})}
    with pytest.raises(ArtefactError, match=r"v1 was trained on d1 and params\.yaml says x1; put it back"):
        list(log_run._training(project.model_copy(update={"versions": project.versions | changed}), "v1"))
