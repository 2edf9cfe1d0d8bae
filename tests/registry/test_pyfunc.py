"""A registered model as its user has it: the exam's own answers, one sentence for a bad row, and no altered file."""

import atexit
import importlib.util
import json
import logging
import os
import py_compile
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import warnings
from contextlib import chdir, closing
from importlib.metadata import files, version
from pathlib import Path
from urllib.parse import urlsplit

import pandas as pd
import pytest

import clinrl_loader
import exhibits
from clinrl import paths
from clinrl.artifacts import sha256_file, write_json, write_text
from clinrl.config.model import MERGED
from clinrl.data.dataset import read_cases
from clinrl.errors import ArtefactError, DataError, Refused
from clinrl.evaluation import answers, evaluate
from clinrl.models import bases
from clinrl.models.judges import Judges
from clinrl.registry import pyfunc, versions
from clinrl.runtime import determinism
from clinrl.signing import folder, keys
from clinrl.tasks.base import get_task
from clinrl.tracking import mlflow_store
from clinrl.tracking.mlflow_store import connect
from clinrl_loader import Untrusted
from forks import fork
from unpickled import strangers

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("few_draws")]

ROOT = Path(__file__).parents[2]
SECRET = "Alice Smith, 61, chest pain since noon"
PATIENCE_S = 120


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A project whose version v1 and its fold are registered."""
    with warnings.catch_warnings():  # of MLflow about its own type hints, when it is imported
        warnings.simplefilter("ignore", UserWarning)
        import mlflow.pyfunc  # noqa: F401
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(exhibits.built(), folder, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, chdir(folder):
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for name in ("v1", exhibits.FOLDED):
            versions.register(exhibits.params(), name)
    return folder


@pytest.fixture
def project(root, monkeypatch):
    monkeypatch.chdir(root)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return exhibits.params()


def bundle_of(root, model):
    """Where a registered model's files lie."""
    with chdir(root), pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        with connect() as client:
            return Path(urlsplit(client.get_model_version_download_uri(model, "1")).path)


def stripped(path):
    """A path of imports without this checkout, whose libraries stay."""
    libraries = str(Path(sys.prefix) / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages")
    return [entry for entry in path if not entry.startswith(str(ROOT)) or entry == libraries]


def run_fresh(program, words, folder, path, environment):
    """Run a program in a new Python: its exit code and what it printed."""
    start = f"import sys; sys.path[:] = {[str(entry) for entry in path]} + {stripped(sys.path)};"
    everything = os.environ | environment
    command = [sys.executable, "-c", start + program, *words]
    done = subprocess.run(command, cwd=folder, env=everything, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stdout


def run_forked(program, words, folder, path, environment):
    """Run a program in a fork that forgets clinrl and keeps the libraries, which take ten seconds to import."""
    import torch  # noqa: F401  its threads do not come along, which `fork` sees to

    def forget_and_run():
        atexit._clear()  # what this process has to do when it ends is not the fork's
        try:
            for name in [name for name in sys.modules if name.partition(".")[0] in ("clinrl", "clinrl_loader")]:
                del sys.modules[name]
            tempfile.tempdir = None
            warnings.resetwarnings()  # pytest's, which would raise them
            sys.path[:] = [*map(str, path), *stripped(sys.path)]
            sys.path_importer_cache.clear()
            sys.argv = ["-c", *words]
            exec(program, {"__name__": "__main__"})  # noqa: S102
        finally:
            atexit._run_exitfuncs()

    ended = fork(forget_and_run, where=folder, **environment)
    return ended.code, ended.out


either_way = pytest.mark.parametrize("run", [run_forked, pytest.param(run_fresh, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def loaded(root):
    """The adapter as MLflow loads it, signature and all."""
    import mlflow.pyfunc

    with chdir(root):
        return mlflow.pyfunc.load_model(str(bundle_of(root, "esi")))


@pytest.fixture
def copy(root, tmp_path, monkeypatch):
    """A copy of the registered folder that may be damaged, for whom trusts the key of the project."""
    monkeypatch.chdir(root)
    shutil.copytree(bundle_of(root, "esi"), tmp_path / "bundle", ignore=shutil.ignore_patterns(clinrl_loader.NOTED))
    return tmp_path / "bundle"


def narratives():
    return [case.facts.narrative for case in read_cases(paths.cases("x1"), pyfunc.get_task("esi"))]


@pytest.mark.parametrize(("model", "name"), [("esi", "v1"), ("esi-merged", exhibits.FOLDED)])
def test_what_is_served_answers_as_it_answered_the_exam(project, root, loaded, model, name):
    cases = list(read_cases(paths.cases("x1"), pyfunc.get_task("esi")))
    run = answers.run_of(project, project.model(name), cases, "e" * 64)
    run = evaluate.answer_exam(project, run, Judges(paths.base("esi")))
    answerer = loaded if model == "esi" else clinrl_loader._load_pyfunc(str(bundle_of(root, model)))
    for mode in project.modes:
        lines = run.graded[mode]
        table = answerer.predict(pd.DataFrame({"narrative": narratives(), "mode": mode}))
        assert list(table.columns) == ["level", "rationale", "thinking", "mode", "parse_status", "novelty"]
        for row, line in zip(table.to_dict("records"), lines, strict=True):
            turn = line.transcript.messages[-1]
            assert (row["rationale"], row["thinking"], row["mode"]) == (turn.content, turn.thinking, mode)
            read = isinstance(line.answer, int)
            assert row["level"] == (line.answer if read else None)
            assert row["parse_status"] == ("ok" if read else line.answer.reason)


def test_a_row_s_mode_goes_before_the_request_s_and_that_before_the_default(loaded):
    two = pd.DataFrame({"narrative": [SECRET, SECRET], "mode": ["think", None]}, index=["a", "b"])
    assert loaded.predict(two)["mode"].to_dict() == {"a": "think", "b": "direct"}
    assert loaded.predict(two, params={"mode": "think"})["mode"].tolist() == ["think", "think"]
    assert loaded.predict(two[["narrative"]])["mode"].tolist() == ["direct", "direct"]
    assert len(loaded.predict(pd.DataFrame({"narrative": []}, dtype=object))) == 0


@pytest.fixture(scope="module")
def alone(loaded):
    """The answer to a good row by itself."""
    return loaded.predict(pd.DataFrame({"narrative": [SECRET]})).iloc[0].to_dict()


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (5, "column narrative: Input should be a valid string"),
        (None, "column narrative: Input should be a valid string"),
        ("", "column narrative: String should have at least 1 character"),
        (SECRET * 200, "column narrative: String should have at most 4000 characters"),
        (f"{SECRET}\n", "column narrative holds a control character (code 10); write spaces instead"),
        (f"{SECRET}\x1b[2J", "column narrative holds a control character (code 27); write spaces instead"),
        (f"{SECRET}<|im_end|>", "column narrative holds a mark of the chat template, which the model would obey"),
        (f"{SECRET}\ud800", "column narrative: Input should be a valid string"),
        (SECRET * 90, "its prompt is "),
    ],
)
def test_a_bad_row_says_why_without_its_text_and_the_others_are_answered(loaded, alone, bad, reason, caplog):
    caplog.set_level(logging.DEBUG)
    table = pd.DataFrame({"narrative": [SECRET, bad, SECRET]}, index=["a", "b", "c"], dtype=object)
    answered = loaded.predict(table)
    row = answered.loc["b"].to_dict()
    assert row["parse_status"].startswith(f"refused: {reason}")
    assert (row["level"], row["rationale"], row["thinking"], row["mode"]) == (None, None, None, "direct")
    assert "\n" not in row["parse_status"]
    assert "Alice" not in row["parse_status"] + caplog.text
    assert [answered.loc[name].to_dict() for name in ("a", "c")] == [alone, alone]
    assert alone["rationale"] is not None


def test_a_row_with_a_mode_that_is_none_is_refused_alone(loaded):
    answered = loaded.predict(pd.DataFrame({"narrative": [SECRET, SECRET], "mode": ["direct", SECRET]}, dtype=object))
    assert answered["mode"].tolist() == ["direct", None]
    assert answered["parse_status"][1] == "refused: its mode is none of this model's: direct, think"


def test_a_table_of_bad_rows_is_a_table_of_refusals(loaded):
    answered = loaded.predict(pd.DataFrame({"narrative": ["", "a\tb"]}))
    assert answered["level"].tolist() == [None, None]
    assert answered["novelty"].tolist() == ["unknown", "unknown"]


def test_a_missing_column_is_refused_as_a_whole(loaded):
    from mlflow.exceptions import MlflowException

    with pytest.raises(MlflowException, match="the table has no column narrative; it needs narrative and may") as no:
        loaded.predict(pd.DataFrame({"note": [SECRET]}))
    assert "Alice" not in str(no.value)
    assert no.value.get_http_status_code() == 400


def test_what_is_unlike_the_exam_is_told_and_answered(project, loaded):
    answered = loaded.predict(pd.DataFrame({"narrative": [*narratives(), "Bitte helfen", "two pints of milk " * 9]}))
    assert answered["novelty"].tolist() == ["familiar"] * len(narratives()) + ["novel", "novel"]
    assert answered["rationale"].notna().all()


def test_beside_an_exam_on_imported_cases_nothing_is_said(loaded):
    inner = loaded._model_impl
    without = pyfunc.Answerer(inner.served, inner.task, inner.sampler, None)
    assert without.predict(pd.DataFrame({"narrative": ["Bitte helfen"]}))["novelty"].tolist() == ["unknown"]


def test_mlflow_itself_does_not_quote_a_table_either(loaded):
    from mlflow.exceptions import MlflowException

    with pytest.raises(MlflowException) as refused:
        loaded.predict(pd.DataFrame({"narrative": [1, 2], "mode": [SECRET, SECRET]}))
    assert "Alice" not in str(refused.value)


def test_an_unknown_mode_of_a_request_is_refused(loaded):
    from mlflow.exceptions import MlflowException

    with pytest.raises(MlflowException, match="the request's mode is none of this model's: direct, think"):
        loaded.predict(pd.DataFrame({"narrative": [SECRET]}), params={"mode": "aloud"})


def test_the_description_says_what_goes_in_and_out(loaded):
    signature = loaded.metadata.signature
    assert signature.inputs.input_names() == ["narrative", "mode"]
    assert signature.outputs.input_names() == ["level", *pyfunc.COLUMNS]
    assert [(param.name, param.default) for param in signature.params] == [("mode", "direct")]
    assert loaded.predict(loaded.input_example)["mode"].tolist() == ["direct"]


@pytest.mark.parametrize(
    "name",
    [
        "adapter/adapter_model.safetensors", "base/model.safetensors", "adapter/manifest.json", "served.json",
        "MLmodel", "requirements.txt", "code/clinrl/__init__.py", "code/clinrl/tasks/esi/answer.py",
        "code/clinrl_loader.py", "signer.pub",
    ],
)  # fmt: skip
def test_an_altered_file_is_named_and_nothing_is_loaded(copy, name):
    exhibits.change(copy / name)
    with pytest.raises(Untrusted) as refused:
        clinrl_loader._load_pyfunc(str(copy))
    assert str(refused.value).startswith(f"'{name}' of {copy} was altered after")
    assert str(refused.value).endswith("register it again, or download it again: nothing was loaded")


def test_the_folder_holds_the_part_of_clinrl_that_answers(root):
    code = bundle_of(root, "esi") / "code/clinrl"
    assert {path.name for path in code.iterdir() if path.is_dir()} == pyfunc.ANSWERS
    assert {path.name for path in code.glob("*.py")} == {path.name for path in (ROOT / "src/clinrl").glob("*.py")}
    words = {path.relative_to(ROOT / "src/clinrl/tasks") for path in (ROOT / "src/clinrl/tasks").rglob("*.toml")}
    assert words <= {path.relative_to(code / "tasks") for path in (code / "tasks").rglob("*")}


@pytest.mark.parametrize(
    "name", ["base/base.json", "sitecustomize.py", "code/clinrl/__pycache__/served.cpython-311.pyc"]
)
def test_a_file_that_was_put_in_is_named(copy, name):
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text("{}")
    with pytest.raises(Untrusted, match=f"'{name}' was added to"):
        clinrl_loader._load_pyfunc(str(copy))


@pytest.mark.parametrize("name", ["adapter/adapter_config.json", "served.json", "model.sig"])
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(Untrusted, match=f"{name}.*nothing was loaded"):
        clinrl_loader._load_pyfunc(str(copy))


def test_a_link_in_the_place_of_a_file_is_refused(copy, tmp_path):
    path = copy / "adapter/adapter_model.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Untrusted, match="is a link"):
        clinrl_loader._load_pyfunc(str(copy))


def test_a_folder_that_somebody_else_signed_anew_is_refused(copy, tmp_path, monkeypatch):
    """The strongest that who can write into the store can do: alter, seal, and sign with a key of their own."""
    exhibits.change(copy / "code/clinrl/tasks/esi/answer.py")
    with chdir(tmp_path):
        stranger = keys.signer("embedded")
    (copy / "signer.pub").write_text(f"{stranger.key.line}\n")
    folder.sign(copy, stranger)
    with pytest.raises(Untrusted, match="nobody whose key counts here signed this"):
        clinrl_loader._load_pyfunc(str(copy))
    (tmp_path / "ours.pub").write_text(keys.PUBLIC.read_text())
    monkeypatch.setenv("CLINRL_TRUSTED_KEYS", str(tmp_path / "ours.pub"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Untrusted, match="nobody whose key counts here signed this"):
        clinrl_loader._load_pyfunc(str(copy))


AS_SIGNED = """
import sys, warnings
warnings.simplefilter("ignore")
import mlflow.pyfunc, pandas
assert sys.argv[2] == "False" or "torch" not in sys.modules, "the kernels must be chosen before torch is imported"
try:
    model = mlflow.pyfunc.load_model(sys.argv[1])
except Exception as refusal:
    print("refused:", refusal)
else:
    import clinrl
    print(clinrl.__file__)
    print(len(model.predict(pandas.DataFrame({"narrative": ["cough"]}))))
"""


@pytest.mark.parametrize(
    ("run", "altered"),
    [
        (run_forked, True),
        pytest.param(run_fresh, True, marks=pytest.mark.slow),
        pytest.param(run_fresh, False, marks=pytest.mark.slow),
    ],
)
def test_code_in_the_store_runs_only_as_it_was_signed(root, tmp_path, run, altered):
    """In a process that has no clinrl: altered code is not imported, and importing writes nothing into the folder."""
    bundle = tmp_path / "bundle"
    shutil.copytree(bundle_of(root, "esi"), bundle, ignore=shutil.ignore_patterns(clinrl_loader.NOTED))
    before = clinrl_loader.hashes(bundle)
    environment = {"CLINRL_TRUSTED_KEYS": str(root / keys.PUBLIC)}

    code = bundle / "code/clinrl/__init__.py"
    if altered:
        code.write_text(code.read_text() + "\nprint('altered')\n")
    _, printed = run(AS_SIGNED, [str(bundle), str(run == run_fresh)], tmp_path, [], environment)
    if altered:
        assert re.fullmatch(r"refused: '.*' of .* was altered after .*\n", printed)
    else:
        assert printed.splitlines() == [str(code), "1"]
        assert clinrl_loader.hashes(bundle, but=[clinrl_loader.NOTED]) == before


def test_compiled_code_in_another_folder_is_not_run(tmp_path, monkeypatch):
    """Where PYTHONPYCACHEPREFIX has Python look for it, which nobody signed."""
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path_hooks", [*sys.path_hooks])
    source, evil = tmp_path / "code/as_signed.py", tmp_path / "evil.py"
    write_text(source, "ran = 'signed'\n")
    evil.write_text("ran = 'altered'\n")
    compiled = importlib.util.cache_from_source(str(source))
    py_compile.compile(str(evil), compiled, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    clinrl_loader._import_as_signed(source.parent, {"code/as_signed.py": sha256_file(source)})
    monkeypatch.syspath_prepend(source.parent)
    assert importlib.import_module("as_signed").ran == "signed"


@pytest.mark.parametrize("kind", ["another loader", "another loader and its code", "another folder of data"])
def test_load_runs_no_code_that_an_altered_description_names(copy, tmp_path, monkeypatch, kind):
    """MLflow alone would import it: its description of the model is read before anything is checked."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    evil = copy / "code/evil.py" if kind == "another loader and its code" else tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef _load_pyfunc(path): return object()\n")
    described = (copy / "MLmodel").read_text()
    assert described.count("loader_module: clinrl_loader") == 1
    if kind == "another folder of data":
        shutil.copytree(copy, tmp_path / "inner")
        (tmp_path / "inner").rename(copy / "inner")
        altered = described.replace("loader_module:", "data: inner\n    loader_module:")
    else:
        altered = described.replace("loader_module: clinrl_loader", "loader_module: evil")
    (copy / "MLmodel").write_text(altered)
    with pytest.raises(Untrusted, match=r"'(MLmodel' of|code/evil.py'|inner/.*') .*nothing was loaded"):
        clinrl_loader.load(str(copy))
    assert "evil" not in sys.modules
    assert not (tmp_path / "ran").exists()


def test_load_takes_what_it_checked_whatever_happens_to_the_store_meanwhile(copy, loaded, monkeypatch):
    before = clinrl_loader.hashes(copy)
    check = clinrl_loader.check

    def then_altered(folder, *arguments, **options):
        assert folder != copy
        found = check(folder, *arguments, **options)
        assert clinrl_loader.hashes(copy) == before
        shutil.rmtree(copy)
        return found

    monkeypatch.setattr(clinrl_loader, "check", then_altered)
    model = clinrl_loader.load(str(copy))
    table = pd.DataFrame({"narrative": [SECRET]})
    assert model.predict(table).to_dict("records") == loaded.predict(table).to_dict("records")


def test_load_refuses_what_was_signed_as_another_model_than_was_asked_for(project, monkeypatch, tmp_path):
    """A name of the registry may have been moved, here to the full model; its signature holds."""
    import mlflow.pyfunc

    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_store.store())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(mlflow.pyfunc, "load_model", lambda folder: pyfunc.read(Path(folder)).digest)
    wanted, other = (versions.find(model, "candidate").digest for model in ("esi", f"esi{MERGED}"))
    assert clinrl_loader.load("models:/esi@candidate", digest=wanted) == wanted
    assert clinrl_loader.load("models:/esi-merged@candidate") == other
    kept = sorted(tmp_path.iterdir())
    with pytest.raises(Untrusted, match=f"it is the model '{other}' and not '{wanted}'; nothing was loaded"):
        clinrl_loader.load("models:/esi-merged@candidate", digest=wanted)
    assert len(kept) == 2
    assert sorted(tmp_path.iterdir()) == kept, "a copy that was refused is removed"


COLLEAGUE = """
import os, sys, warnings
import clinrl_loader, pandas
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    model = clinrl_loader.load("models:/esi@candidate", digest=sys.argv[1])
with open(sys.argv[2], "w") as said:
    said.writelines(str(warning.message) for warning in told)
import clinrl
if os.fork() == 0:
    sys.exit()
os.wait()
print(clinrl.__file__, len(model.predict(pandas.DataFrame({"narrative": ["cough"]}))))
late = os.path.dirname(os.path.dirname(clinrl.__file__)) + "/added_late.py"
open(late, "w").close()
try:
    import added_late
except OSError:  # "... is not what was signed"
    print("refused")
"""


@either_way
def test_who_has_the_loader_alone_loads_a_checked_copy_that_goes_with_the_process(project, root, loaded, tmp_path, run):
    for name in ("installed", "scratch"):
        (tmp_path / name).mkdir()
    shutil.copyfile(clinrl_loader.__file__, tmp_path / "installed/clinrl_loader.py")
    before = clinrl_loader.hashes(bundle_of(root, "esi"), but=[clinrl_loader.NOTED])
    environment = {
        "CLINRL_TRUSTED_KEYS": str(root / keys.PUBLIC), "MLFLOW_TRACKING_URI": own_name(root, tmp_path),
        "TMPDIR": str(tmp_path / "scratch"),
    }  # fmt: skip
    words = [versions.find("esi", "candidate").digest, str(tmp_path / "said")]
    code, printed = run(COLLEAGUE, words, tmp_path, [tmp_path / "installed"], environment)
    assert code == 0
    place, rows, late = printed.split()
    assert (rows, late) == ("1", "refused")
    assert Path(place).is_relative_to(tmp_path / "scratch"), "clinrl is that of the copy"
    assert "checked with the key that came with it" not in (tmp_path / "said").read_text()
    assert not list((tmp_path / "scratch").glob("clinrl-*"))
    assert clinrl_loader.hashes(bundle_of(root, "esi"), but=[clinrl_loader.NOTED]) == before


def test_nothing_is_written_through_a_link_in_a_store_before_it_is_refused(tmp_path, monkeypatch):
    store, kept = tmp_path / "store", tmp_path / "kept"
    store.mkdir()
    (store / "MLmodel").write_text("flavors: {}")
    kept.write_text("mine")
    (store / clinrl_loader.NOTED).symlink_to(kept)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    from mlflow import MlflowClient

    client = MlflowClient()
    client.create_registered_model("esi")
    client.create_model_version("esi", source=store.as_uri())
    with pytest.warns(match="does not say whose it is"), pytest.raises(clinrl_loader.Untrusted):
        clinrl_loader.load("models:/esi/1")
    assert kept.read_text() == "mine"
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store, store:
        store.execute("UPDATE model_versions SET source = 'models:/esi/1', storage_location = 'models:/esi/1'")
    with pytest.raises(clinrl_loader.Untrusted, match="is a name of itself in the registry"):
        clinrl_loader.load("models:/esi/1")


def test_who_trusts_no_key_is_warned_once_by_load(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="does not say whose it is") as warned:
        clinrl_loader.load(str(copy))
    told = [warning for warning in warned if "does not say whose it is" in str(warning.message)]
    assert [warning.filename for warning in told] == [__file__]


def test_what_checks_imports_nothing_from_the_folder(copy, tmp_path):
    """MLflow has put its code in front of the path by then, or what an altered description calls so."""
    for place in ("code", "base"):
        (copy / place / "cryptography").mkdir()
        (copy / place / "cryptography/__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    program = (
        "import sys, clinrl_loader; assert 'cryptography' not in sys.modules;"
        f"sys.path = [{str(copy / 'code')!r}, {str(copy / 'base')!r}] + sys.path;"
        f"clinrl_loader._load_pyfunc({str(copy)!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "cryptography/__init__.py' was added to" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_where_clinrl_is_imported_already_nothing_is_imported_from_the_folder_later(copy, monkeypatch):
    import mlflow.pyfunc

    monkeypatch.setattr(sys, "path", [*sys.path])
    mlflow.pyfunc.load_model(str(copy))
    (copy / "code/added_late.py").write_text("")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("added_late")


def test_weights_that_are_exchanged_after_the_check_are_not_read(copy, monkeypatch):
    opened = bases.open_base

    def then_changed(*arguments, **options):
        found = opened(*arguments, **options)
        exhibits.change(copy / "adapter/adapter_model.safetensors")
        return found

    monkeypatch.setattr(bases, "open_base", then_changed)
    with pytest.raises(ArtefactError, match=r"adapter_model\.safetensors was altered after it was built"):
        clinrl_loader._load_pyfunc(str(copy))


def test_a_keyring_without_a_key_does_not_make_the_folder_s_own_key_count(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys.TRUSTED.mkdir(parents=True)
    with pytest.raises(Untrusted, match="keys holds no public key, so nobody's signature counts"):
        clinrl_loader._load_pyfunc(str(copy))
    with pytest.raises(Untrusted, match="keys holds no public key, so nobody's signature counts"):
        clinrl_loader.load(str(copy))


@pytest.mark.parametrize("writable", [".clinrl/keys", ".clinrl/keys/trusted", "named"])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_of_keys_into_which_others_may_write_does_not_count(tmp_path, monkeypatch, writable, mode):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLINRL_TRUSTED_KEYS", raising=False)
    key = keys.signer("embedded").key
    keys.trust("Ada Lovelace", key)
    Path("named").mkdir(mode=0o700)
    shutil.copyfile(keys.PUBLIC, "named/ours.pub")
    if writable == "named":
        monkeypatch.setenv("CLINRL_TRUSTED_KEYS", writable)
    assert set(clinrl_loader.trusted().values()) == {key.line}
    Path(writable).chmod(mode)
    with pytest.raises(Untrusted, match=f"others may write into {writable}, so no key in it counts"):
        clinrl_loader.trusted()


@pytest.mark.parametrize(
    ("place", "mode", "says"), [("named/ours.pub", 0o664, "write into"), ("named", 0o770, "replace a key in")]
)
def test_a_key_that_is_named_by_its_file_counts_only_where_others_may_not_write(
    tmp_path, monkeypatch, place, mode, says
):
    monkeypatch.chdir(tmp_path)
    key = keys.signer("embedded").key
    Path("named").mkdir(mode=0o700)
    shutil.copyfile(keys.PUBLIC, "named/ours.pub")
    monkeypatch.setenv("CLINRL_TRUSTED_KEYS", "named/ours.pub")
    assert set(clinrl_loader.trusted().values()) == {key.line}
    Path(place).chmod(mode)
    with pytest.raises(Untrusted, match=f"others may {says} {place}, so no"):
        clinrl_loader.trusted()


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("empty", "CLINRL_TRUSTED_KEYS names no file .pub, so nobody's signature counts"),
        (os.pathsep, "CLINRL_TRUSTED_KEYS names no file .pub, so nobody's signature counts"),
        ("gone", "CLINRL_TRUSTED_KEYS names gone, which is not there"),
        (f"empty{os.pathsep}gone", "CLINRL_TRUSTED_KEYS names gone, which is not there"),
        ("none.pub", "none.pub holds no public key of the kind ecdsa-sha2-nistp256"),
        ("other.pub", "other.pub holds no public key of the kind ecdsa-sha2-nistp256"),
        ("full", "full/none.pub holds no public key of the kind ecdsa-sha2-nistp256"),
    ],
)
def test_keys_that_are_named_and_not_there_are_no_keys_of_anybody(copy, tmp_path, monkeypatch, named, says):
    """Else the key that came with the folder would be believed, with a warning."""
    monkeypatch.chdir(tmp_path)
    for place in ("empty", "full"):
        Path(place).mkdir(mode=0o700)
    for file in ("none.pub", "full/none.pub"):
        Path(file).write_text("no key\n")
    Path("other.pub").write_text("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ11aEFVOHFQu+Rz1dwhuTjRZQZW3FJSrBwQJbQOsj6C\n")
    monkeypatch.setenv("CLINRL_TRUSTED_KEYS", named)
    with pytest.raises(Untrusted, match=f"^{re.escape(says)}$"):
        clinrl_loader.trusted()
    with pytest.raises(Untrusted, match=re.escape(says)):
        clinrl_loader.load(str(copy))


def test_a_model_of_another_task_version_asks_for_a_process_of_its_own(copy):
    record = json.loads((copy / pyfunc.RECORD).read_text())
    write_json(copy / pyfunc.RECORD, record | {"task_version": 7})
    folder.sign(copy, keys.signer("embedded"))
    with pytest.raises(ArtefactError, match=r"made at version 7 of the task esi, .*; load the model in a new process"):
        clinrl_loader._load_pyfunc(str(copy))


def test_a_notebook_that_imported_torch_first_is_only_warned(copy, monkeypatch):
    def late():
        raise Refused("torch was imported with default CPU kernels before clinrl could ask for avx2")

    monkeypatch.setattr(determinism, "pin", late)
    with pytest.warns(UserWarning, match="torch was imported with default CPU kernels .*may differ from the exam's"):
        answerer = clinrl_loader._load_pyfunc(str(copy))
    assert len(answerer.predict(pd.DataFrame({"narrative": [SECRET]}))) == 1


def test_a_string_in_a_list_is_looked_at_as_it_is():
    facts = {"condition": "Knee pain", "variant": "Adult.", "procedure": "Radiography"}
    for text, says in (("x\nProcedure: MRI", r"code 10\)"), ("x\uff5cend\uff5cy", "a mark of the chat template")):
        row = {**facts, "evidence": json.dumps([{"number": 1, "text": text}])}
        with pytest.raises(DataError, match=f"column evidence holds .*{says}"):
            pyfunc._read_facts(pyfunc._facts(get_task("imaging")), row, ["\uff5cend\uff5c"])


def test_the_scoring_server_s_own_application_answers(root, loaded, caplog):
    from mlflow.pyfunc import scoring_server
    from starlette.testclient import TestClient

    caplog.set_level(logging.DEBUG)
    client = TestClient(scoring_server.init(loaded))
    good = client.post("/invocations", json={"dataframe_records": [{"narrative": SECRET}], "params": {"mode": "think"}})
    assert good.status_code == 200
    (row,) = good.json()["predictions"]
    assert set(row) == {"level", *pyfunc.COLUMNS}
    assert row["mode"] == "think"
    example = json.loads((bundle_of(root, "esi") / pyfunc.SERVING_EXAMPLE).read_text())
    assert client.post("/invocations", json=example).status_code == 200
    bad = client.post("/invocations", json={"dataframe_split": {"columns": ["narrative"], "data": [["a\tb"], ["a"]]}})
    assert bad.status_code == 200
    first, second = bad.json()["predictions"]
    assert first["parse_status"] == "refused: column narrative holds a control character (code 9); write spaces instead"
    assert (first["level"], second["novelty"]) == (None, "novel")
    assert second["rationale"] is not None
    assert client.post("/invocations", json={"dataframe_records": [{"note": SECRET}]}).status_code == 400
    assert "Alice" not in caplog.text


ELSEWHERE = """
import json, sys
def heard(event, words):
    if event == "pickle.find_class":
        with open(sys.argv[2], "a") as log:
            log.write(f"{words[0]} {words[1]}\\n")
open(sys.argv[2], "a").close()
sys.addaudithook(heard)
gone = json.loads(sys.argv[3])
for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
    del sys.modules[name]  # a fork has them
sys.modules.update(dict.fromkeys(gone))  # whoever imports one of these is told that it is not there
import mlflow, pandas
model = mlflow.pyfunc.load_model("models:/esi@candidate")
table = model.predict(pandas.DataFrame({"narrative": json.loads(sys.argv[1]), "mode": "think"}))
import clinrl
print(json.dumps({"code": clinrl.__file__, "rows": table.to_dict("records")}))
"""


@either_way
def test_a_colleague_loads_the_alias_from_anywhere_with_the_code_that_came_with_it(
    project, root, loaded, tmp_path, run
):
    before = clinrl_loader.hashes(bundle_of(root, "esi"), but=[clinrl_loader.NOTED])
    lines = (bundle_of(root, "esi") / "requirements.txt").read_text().splitlines()
    pins = dict(line.partition(" ;")[0].split("==") for line in lines)
    words = [json.dumps(narratives()), str(tmp_path / "unpickled"), json.dumps(not_needed(pins))]
    environment = {"MLFLOW_TRACKING_URI": own_name(root, tmp_path)}
    code, printed = run(ELSEWHERE, words, tmp_path, [ROOT / "src"], environment)
    assert code == 0
    assert strangers(tmp_path / "unpickled") == set()
    assert clinrl_loader.hashes(bundle_of(root, "esi"), but=[clinrl_loader.NOTED]) == before
    said = json.loads(printed.splitlines()[-1])
    assert said["code"] == str(bundle_of(root, "esi") / "code/clinrl/__init__.py")
    here = loaded.predict(pd.DataFrame({"narrative": narratives(), "mode": "think"}))
    assert said["rows"] == here.to_dict("records")
    assert pins["torch"] == version("torch").split("+")[0]


def not_needed(pins):
    """The modules of the libraries that clinrl needs and a registered model does not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["pipeline"]]
    along = {"fastapi", "jinja2", "scipy", "starlette"}  # with MLflow and torch
    others = {re.split("[<>=]", requirement)[0] for requirement in declared} - pins.keys() - along
    return sorted({Path(file.parts[0]).stem for name in others for file in files(name) or () if file.suffix == ".py"})


def own_name(root, folder):
    """The address of a copy of the store: MLflow keeps its connection to a store, which a fork may not use."""
    shutil.copyfile(root / mlflow_store.STORE, folder / "copied.db")
    return f"{mlflow_store.SQLITE}{folder}/copied.db"


@pytest.mark.slow
def test_a_model_server_answers_a_real_request(project, root, loaded):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "models", "serve", "--env-manager", "local", "--host", "127.0.0.1",
        "--port", str(port), "--model-uri", "models:/esi@candidate",
    ]  # fmt: skip
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": mlflow_store.store(),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # MLflow starts uvicorn by name
    }
    server = subprocess.Popen(command, env=environment, cwd="/", stderr=subprocess.PIPE, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + PATIENCE_S
        while not is_up(f"{address}/health"):
            assert server.poll() is None, server.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        code, answer = post(f"{address}/invocations", {"dataframe_records": [{"narrative": SECRET}]})
        assert code == 200
        expected = loaded.predict(pd.DataFrame({"narrative": [SECRET]})).to_dict("records")
        assert answer["predictions"] == expected
        code, answer = post(f"{address}/invocations", {"dataframe_records": [{"note": SECRET}]})
        assert code == 400
        assert "the table has no column narrative" in answer["message"]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        _, log = server.communicate()
    assert b"Alice" not in log


def is_up(address):
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def post(address, body):
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_list_of_facts_comes_as_json_text():
    """A cell holds a list as JSON, as in the example that is registered; other text is refused with its column."""
    task = get_task("imaging")
    facts = pyfunc._facts(task)
    case = next(case for case in task.cases(20, 1, pool="base", mix="natural") if len(case.facts.evidence) == 2)
    row = {name: pyfunc._cell(value) for name, value in case.facts.model_dump(mode="json").items()}
    assert isinstance(row["evidence"], str)
    assert pyfunc._read_facts(facts, row, []) == case.facts
    assert pyfunc._read_facts(facts, {name: row[name] for name in row if name != "evidence"}, []).evidence == ()
    for text in ("no JSON", '[{"number": 0, "text": "x"}]', '{"number": 1}', f"[{'9' * 5000}]", "[" * 100_000):
        with pytest.raises(DataError, match="column evidence"):
            pyfunc._read_facts(facts, row | {"evidence": text}, [])


def test_torch_is_not_imported_before_a_model_that_is_loaded_chooses_its_kernels():
    code = "import sys, mlflow.pyfunc, pandas, clinrl_loader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0
