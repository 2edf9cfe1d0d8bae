"""The files by which a repository is joined say what the project says elsewhere."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(file: str) -> Any:
    return yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    cited = read("CITATION.cff")
    assert (cited["title"], cited["version"], cited["license"]) == tuple(
        PROJECT[key] for key in ("name", "version", "license")
    )
    assert cited["abstract"] == PROJECT["description"]
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "authors"} <= cited.keys()


def test_hosted_ci_runs_what_ci_runs_and_may_write_nothing() -> None:
    workflow = read(".github/workflows/ci.yml")
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert workflow["permissions"] == {"contents": "read"}
    (python,) = (step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert PROJECT["requires-python"] == f">={python}"


def test_a_hook_before_a_commit_is_a_line_of_make_check() -> None:
    checked = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ncheck:")[1].split("\n\n")[0]
    for repository in read(".pre-commit-config.yaml")["repos"]:
        assert repository["repo"] == "local"  # the versions that are pinned, and no others
        for hook in repository["hooks"]:
            assert hook["entry"].replace(".venv/bin/", "$(BIN)/") in checked


def test_a_container_installs_what_make_installs() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert container["postCreateCommand"] == "make .venv/.installed"
    assert "\nVENV := .venv\n" in makefile
    assert "\nREADY := $(VENV)/.installed\n" in makefile
    assert PROJECT["requires-python"].removeprefix(">=") in container["image"]


def test_the_image_holds_what_make_installs_and_is_nobody_s_root() -> None:
    lines = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8").splitlines()
    (base,) = (line.split()[1] for line in lines if line.startswith("FROM "))
    assert base.startswith(f"python:{PROJECT['requires-python'].removeprefix('>=')}-")
    own = next(number for number, line in enumerate(lines) if line == "USER clinrl")
    (installs,) = (number for number, line in enumerate(lines) if "make .venv/.installed" in line and line[0] == "R")
    assert own < installs
    private = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    anywhere = {
        ".clinrl",
        ".dvc/config.local",
        ".env",
        "data/adapters/*",
        "data/exports",
        "data/sources",
        "machine.yaml",
    }
    assert {f"**/{path}" for path in anywhere} | {".git"} <= {*private}  # secrets and records


@pytest.mark.parametrize("folder", ["", "full/"])
def test_git_takes_no_records_and_no_keys_from_a_project_in_a_folder_either(tmp_path: Path, folder: str) -> None:
    shutil.copy(ROOT / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    own = ("data/sources/ward.csv", "data/cases/d1/cases.jsonl", "data/exports/a.jsonl", "data/graded/v1/think.jsonl",
           "data/dossiers/v1.zip", "mlruns/mlflow.db", ".clinrl/keys/signing.pem", "machine.yaml")  # fmt: skip
    for path in (*own, "data/reports/v1/think.json", "data/sources/synthetic/triage.csv"):
        (tmp_path / folder / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / path).touch()
    command = ["git", "ls-files", "--others", "--exclude-standard", "--", folder or "."]
    shown = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()
    assert {*shown} - {".gitignore"} == {
        f"{folder}data/reports/v1/think.json",
        f"{folder}data/sources/synthetic/triage.csv",
    }


@pytest.mark.parametrize("setting", ["core.autocrlf=true", "core.eol=crlf"])
def test_no_setting_of_git_changes_a_byte_of_a_clone(tmp_path: Path, setting: str) -> None:
    """Digests are of bytes: with other ends of lines every base would count as altered, and no script would start."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", setting]
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    for text in (b"a\nb\n", b"a\r\nb\n"):
        (tmp_path / "file").write_bytes(text)
        for words in (
            ["init", "-q"],
            ["add", "-A"],
            ["commit", "-qm", "a"],
            ["rm", "-q", "file"],
            ["reset", "-q", "--hard"],
        ):
            subprocess.run([*git, *words], cwd=tmp_path, check=True)
        assert (tmp_path / "file").read_bytes() == text


def test_the_composed_servers_hold_no_secret_and_are_published_on_loopback_alone() -> None:
    services = read("deploy/compose.yaml")["services"]
    for name, service in services.items():
        assert name == "worker" or "healthcheck" in service or service["restart"] == "on-failure", name
        assert service["image"] == "clinrl" or ":" in service["image"].removesuffix(":latest"), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for key, value in service["environment"].items():
            if any(word in key for word in ("PASSWORD", "SECRET", "AUTH", "KEY_ID", "USER", "DATABASE", "STORE_URI")):
                hidden = re.sub(r"\$\{\w+:\?\}", "", value)
                assert hidden != value, f"{name}: {key}"
                assert re.fullmatch(r"|postgresql(\+asyncpg)?://postgres:@database/(prefect|mlflow)", hidden), (
                    f"{name}: {key}"
                )
        assert {*service.get("depends_on", ())} <= services.keys()


def test_a_volume_of_the_image_s_is_owned_by_who_runs_there() -> None:
    """Docker gives a new volume the owner of what the image has at its place, and without that it is root's."""
    lines = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8").split("\nUSER clinrl\n")[1].splitlines()
    made = {path for line in lines for words in re.findall(r"mkdir -p ((?:\S+ ?)+)", line) for path in words.split()}
    services = read("deploy/compose.yaml")["services"].values()
    mounted = {mount.split(":")[1] for one in services if one["image"] == "clinrl" for mount in one.get("volumes", ())}
    assert mounted == {"/home/clinrl/.prefect", "/home/clinrl/clones"}
    assert mounted <= made


def test_a_server_that_is_started_by_hand_is_set_as_the_composed_one() -> None:
    page = (ROOT / "docs/many-machines.md").read_text(encoding="utf-8")
    composed = read("deploy/compose.yaml")["services"]["prefect"]["environment"]
    given = dict(re.findall(r"(PREFECT_SERVER_\w+)=(\S+)", page))
    assert given.keys() == {name for name in composed if name.startswith("PREFECT_SERVER_")}
    assert "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false" in page
    for name in ("VACUUM_ENABLED", "ANALYTICS_ENABLED"):
        (key,) = (one for one in composed if one.endswith(name))
        assert given[key] == composed[key]


@pytest.mark.parametrize("form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda form: form.stem)
def test_a_form_asks_for_something(form: Path) -> None:
    content = read(str(form.relative_to(ROOT)))
    assert {"name", "description", "body"} <= content.keys()
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)
