"""The command line: usage, refusals, exit codes, and what help does not import."""

import errno
import inspect
import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import clinrl
from clinrl import paths
from clinrl.__main__ import program
from clinrl.cli import commands
from clinrl.cli import main as cli
from clinrl.cli.parser import parser
from clinrl.data import dataset
from clinrl.errors import Busy, DataError, TrainingError
from clinrl.pipeline import plan

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "mlflow", "prefect", "great_expectations", "pandas", "pydantic"}


@pytest.fixture(autouse=True)
def _unchanged_environment(monkeypatch):
    """`main.main` pins variables of the process; they go back to what they were after each test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def project(valid, tmp_path, monkeypatch) -> Path:
    """A folder with a params.yaml whose data sets are small, as the working directory."""
    for spec in valid["datasets"].values():
        spec["cases"] = 5
    with (tmp_path / "params.yaml").open("w", encoding="utf-8") as stream:
        YAML(typ="safe", pure=True).dump(valid, stream)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`python -m clinrl` in a process of its own."""
    return subprocess.run(
        [sys.executable, *options, "-m", "clinrl", *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["verify", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    done = run(*arguments, options=("-X", "importtime"))
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert "clinrl" in imported
    assert not imported & HEAVY


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"clinrl {clinrl.__version__}\n"


def test_help_names_every_subcommand(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    for group, members in commands.GROUPS.items():
        assert f"\n  {group}:\n" in text
        for name, command in members.items():
            assert f"\n    {name:<11} {command.help}\n" in text
    assert max(map(len, text.splitlines())) < 80


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_of_a_subcommand_has_examples(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"examples:\n  clinrl {name}" in text
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trian", "esi-v46"],
        ["train"],
        ["train", "a", "b"],
        ["train", "a", "--par", "x"],
        ["show", "esi-v46"],
        ["show", "esi-v46", "3", "--random", "1"],
        ["show", "esi-v46", "--wrong", "0"],
        ["serve", "esi", "--at-once", "0"],
        ["serve", "esi", "--port", "-1"],
        ["serve", "esi", "--port", "x"],
    ],
)
def test_a_usage_error_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: clinrl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "required: COMMAND; `clinrl --help` lists what there is\n"),
        (["keys"], "required: ACTION; allowed: init, show, trust, vouch\n"),
        (["watch"], "required: ACTION; allowed: report, labels\n"),
        (["export"], "required: ACTION; allowed: inspect, lm-eval, openenv, verifiers\n"),
        (["train"], "required: VERSION\n"),
    ],
)
def test_a_missing_action_is_refused_with_those_that_there_are(words, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert capsys.readouterr().err.endswith(says)


@pytest.mark.parametrize(
    ("command", "name", "fragments"),
    [
        ("train", "v12", ("no version", "did you mean v", "allowed: v1, v2, v3")),
        ("probe", "esi-base", ("no version", "allowed: ")),
        ("train", "", ("no version", "allowed: v1, v2, v3")),
        ("dataset", "esi-d9", ("no dataset", "did you mean esi-d1?", "esi-m1")),
        ("validate", "v1", ("no dataset", "esi-x1")),
        ("base", "esl", ("no task", "did you mean esi?")),
        ("evaluate", "esi-bsae", ("no version", "did you mean esi-base?")),
        ("protocol", "esi-bsae", ("no version", "did you mean esi-base?")),
        ("plan", "v99", ("is not a version", "allowed: ")),
    ],
)
def test_an_unknown_name_is_refused_with_the_allowed_ones(command, name, fragments, project, capsys):
    assert cli.main([command, name]) == 2
    error = capsys.readouterr().err
    assert error.startswith("clinrl: ")
    assert error.count("\n") == 1
    for fragment in (repr(name), *fragments):
        assert fragment in error


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["trian", "esi-v46"], "'trian' is not one; did you mean train?"),
        (["eval", "esi-v46"], "did you mean evaluate?"),
        (["Plan"], "did you mean plan?"),
        (["mlflow"], "did you mean register or versions?"),
        (["comparison", "x"], "did you mean compare?"),
        (["keys", "ini"], "did you mean init? allowed: init, show, trust, vouch"),
        (["plan", "--jsn"], "unrecognized arguments: --jsn; did you mean --json?"),
        (["zzzz"], "'zzzz' is not one; `clinrl --help` lists what there is"),
    ],
)
def test_a_near_miss_is_suggested(words, meant, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert meant in capsys.readouterr().err


def test_a_name_of_one_task_is_refused_without_those_of_others(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert cli.main(["train", "esi-v94"]) == 2
    error = capsys.readouterr().err
    assert "did you mean esi-v49?" in error
    listed = error.split("allowed: ")[1].strip().split(", ")
    assert "esi-v49" in listed
    assert all(name.startswith("esi-") for name in listed)


@pytest.mark.parametrize("name", ["esi@champion", "models:/esi@champion", "esi@champoin"])
@pytest.mark.parametrize("command", ["lookup", "train", "evaluate", "compare"])
def test_an_alias_that_is_spelt_as_elsewhere_is_said_as_here(command, name, project, capsys):
    assert cli.main([command, name]) == 2
    assert capsys.readouterr().err.endswith("to say what an alias stands for: `clinrl lookup esi champion`\n")


def test_a_wrong_params_file_exits_with_2(project, capsys):
    (project / "params.yaml").write_text("scale: laptop\n")
    assert cli.main(["train", "v2"]) == 2
    assert capsys.readouterr().err == ("clinrl: params.yaml: bases is missing; it is needed (Task to its base)\n")


def test_a_missing_params_file_exits_with_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan"]) == 2
    assert "clinrl: params.yaml does not exist" in capsys.readouterr().err


def test_a_machine_without_git_is_a_sentence(project, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert cli.main(["verify", "v2"]) == 1
    assert capsys.readouterr().err == (
        "clinrl: git is not installed, or not in PATH; install it and give the same command again\n"
    )


def test_a_folder_that_was_deleted_is_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert cli.main(["check"]) == 1
    assert capsys.readouterr().err == "clinrl: the folder in which this was started is deleted; start it in another\n"


@pytest.mark.parametrize(
    "arguments", [["--params", "b.yaml", "dataset", "esi-d1"], ["dataset", "esi-d1", "--params", "b.yaml"]]
)
def test_params_may_stand_before_or_after_the_subcommand(arguments, project):
    (project / "params.yaml").rename("b.yaml")
    assert cli.main(arguments) == 0
    assert len((paths.cases("esi-d1") / paths.CASES_FILE).read_text().splitlines()) == 5


def test_params_that_a_command_would_not_read_are_refused(project, capsys):
    assert cli.main(["verify", "esi-v46", "--params", "b.yaml"]) == 2
    assert capsys.readouterr().err == "clinrl: `clinrl verify` reads no file of --params; leave it out\n"


def test_an_interrupt_while_the_modules_are_read_is_told_in_a_sentence(monkeypatch, capsys):
    class Interrupted:
        @staticmethod
        def find_spec(name, *_):
            if name == "clinrl.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "clinrl.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    assert program() == 130
    assert capsys.readouterr().err == "clinrl: interrupted; give the same command again\n"


def test_a_stage_runs_in_a_process_as_dvc_starts_it(project):
    done = subprocess.run(
        [sys.executable, "-m", "clinrl", "dataset", "esi-x1"], capture_output=True, text=True, check=False, cwd=project
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (project / paths.cases("esi-x1") / "manifest.json").exists()


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (DataError("row 3 is bad"), 1, "clinrl: row 3 is bad\n"),
        (TrainingError("it diverged"), 3, "clinrl: it diverged\n"),
        (Busy("another one writes"), 75, "clinrl: another one writes\n"),
        (KeyboardInterrupt(), 130, "clinrl: interrupted; give the same command again\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "data/cases/x"),
            1,
            "clinrl: disk is full at data/cases/x: free some space and give the same command again\n",
        ),
        (
            OSError(errno.EIO, "Input/output error", "data/adapters/x"),
            1,
            "clinrl: the disk fails to read or write at data/adapters/x: restore what it lost and give the same "
            "command again\n",
        ),
        (
            OSError(errno.EPERM, "Operation not permitted", ".dvc/cache"),  # of somebody else
            1,
            "clinrl: this user may not change it at .dvc/cache: use one of your own and give the same command again\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            1,
            "clinrl: disk is full: free some space and give the same command again\n",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "data/graded/x", None, "data/cases/x"),  # of a copy
            1,
            "clinrl: disk is full at data/cases/x: free some space and give the same command again\n",
        ),
        (
            shutil.Error([("a", "b", "[Errno 28] No space left on device")]),
            1,
            "clinrl: disk is full: free some space and give the same command again\n",
        ),
    ],
)
def test_what_a_stage_raises_becomes_a_sentence_and_an_exit_code(raised, code, message, project, monkeypatch, capsys):
    def stage(params, name):
        raise raised

    monkeypatch.setattr(dataset, "stage", stage)
    assert cli.main(["dataset", "esi-d1"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "raised", [ZeroDivisionError("a bug"), OSError(errno.EBADF, "no such stream"), OSError(errno.EPERM, "no signal")]
)
def test_a_bug_keeps_its_traceback(raised, project, monkeypatch):
    def stage(params, version, **options):
        raise raised

    monkeypatch.setattr(plan, "stage", stage)
    with pytest.raises(type(raised)):
        cli.main(["plan"])


def test_a_library_that_is_not_installed_is_a_sentence(project, monkeypatch, capsys, tmp_path):
    (tmp_path / "own_task.py").write_text("from no_such_library.part import thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plan, "stage", lambda *_, **__: import_module("own_task"))
    assert cli.main(["plan"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        f"clinrl: no_such_library, which {tmp_path}/own_task.py imports, is not installed; run `pip install "
    )
    monkeypatch.setattr(plan, "stage", lambda *_, **__: import_module("clinrl.no_such_module"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["plan"])


@pytest.mark.long
@pytest.mark.parametrize("words", [["plan"], ["--help"], ["train", "--help"], ["--version"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_said(words, unbuffered, project):
    """/dev/full is a disk without space. Python tells of it at once, or, if it buffers, at the end."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    command, env = [sys.executable, "-m", "clinrl", *words], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=env)
    assert done.returncode == 1
    assert done.stderr.endswith("clinrl: disk is full: free some space and give the same command again\n")
    assert "Traceback" not in done.stderr


def test_a_limit_of_the_shell_for_files_is_said(project):
    limited = ["bash", "-c", 'ulimit -f 1; exec "$0" -m clinrl dataset esi-d1', sys.executable]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        "clinrl: a file would pass the limit of this shell: raise it (`ulimit -f unlimited`) and give the same command "
        "again",
    )


@pytest.mark.long
@pytest.mark.parametrize("words", [["plan"], pytest.param(["params", "--resolved"], marks=pytest.mark.slow)])
def test_output_that_nobody_reads_is_no_traceback(words, project):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "clinrl", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(("words", "closed", "code"), [("plan", ">&-", 0), ("plan none", "2>&-", 2)])
def test_a_stream_that_the_shell_closed_is_no_fault_and_its_lines_go_nowhere_else(words, closed, code, project):
    command = f'"$0" -m clinrl {words} {closed}'
    done = subprocess.run(["bash", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (code, "", False)


def test_commands_are_pinned_before_anything_else(project, monkeypatch):
    monkeypatch.delenv("DO_NOT_TRACK", raising=False)
    assert cli.main(["dataset", "esi-d1"]) == 0
    assert os.environ["DO_NOT_TRACK"] == "true"


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_each_command_has_a_function_that_takes_its_arguments(name):
    command = commands.COMMANDS[name]
    if command.stage:
        assert callable(import_module(f"clinrl.{command.stage}").stage)
    own = [(command.runs, (*command.arguments, *command.one_of))] if command.runs else []
    for runs, arguments in (*own, *((one.runs or command.runs, one.arguments) for one in command.actions.values())):
        module, _, function = runs.partition(":")
        takes = inspect.signature(getattr(import_module(f"clinrl.{module}"), function)).parameters
        parser = ArgumentParser(conflict_handler="resolve")
        for argument in arguments:
            assert parser.add_argument(*argument.flags, **argument.settings).dest in takes


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["labels", "esi", "--out", "."], "'.' is a folder; name a file"),
        (["labels", "esi", "--out="], "'' is a folder; name a file"),
        (["labels", "esi", "--out", "params.yaml/labels.jsonl"], "'params.yaml' is no folder"),
        (["export", "lm-eval", "esi", "--out", "params.yaml"], "'params.yaml' is no folder"),
        (["export", "lm-eval", "esi", "--out", "params.yaml/x" + "y" * 300], "'params.yaml' is no folder"),
    ],
)
def test_a_file_is_not_written_over_a_folder_nor_below_a_file(project, capsys, words, refused):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert refused in capsys.readouterr().err


@pytest.mark.long
def test_a_character_that_the_output_lacks_is_replaced():
    done = subprocess.run(
        [sys.executable, "-m", "clinrl", "plan", "--graph", "esi"], capture_output=True, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert b"?? esi-v43" in done.stdout


STREAMS = """
import os, sys
from clinrl.cli.main import main
os.dup2(os.pipe()[1], 1)
sys.exit(main(["check"]))
"""


@pytest.mark.long
def test_a_fork_whose_server_writes_into_a_file_may_write_into_a_pipe(tmp_path):
    """Python's own stream is still that of the file then, in which it would look for its place."""
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", STREAMS], stdout=log, stderr=subprocess.PIPE, check=False, cwd=ROOT
        )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["show", "esi-v49", "--mode", "direct", "1"], {"episode": "1", "mode": "direct"}),
        (["lookup", "esi", "--json", "champion"], {"which": "champion"}),
        (["compare", "esi-v49", "--json", "esi-v43"], {"other": "esi-v43"}),
        (["watch", "report", "esi", "--params", "t.yaml"], {"params": Path("t.yaml"), "action": "report"}),
    ],
)  # fmt: skip
def test_an_option_may_stand_anywhere(words, found):
    given = vars(parser().parse_args(words))
    assert {name: given.get(name) for name in found} == found
