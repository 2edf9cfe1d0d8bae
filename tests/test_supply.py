"""What `make` installs has the hashes that are committed; what is shipped has a licence.

The recipe runs as it stands in the Makefile, on libraries of a few lines in place of those of constraints.txt.
"""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from uv import find_uv_bin

from clinrl.provenance import pins

ROOT = Path(__file__).resolve().parents[1]
BACKEND = """\
def build_editable(folder, config_settings=None, metadata_directory=None):
    import pathlib, zipfile
    name = "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return name
"""


def wheel(folder: Path, name: str, version: str, script: str = "") -> pins.Pin:
    """A library of one module, which asks for a library that does not exist; and its pin."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    needs = "Requires-Dist: never-to-be-resolved\n"
    files = {
        f"{name}_module.py": "",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if script:
        files[f"{name}-{version}.data/scripts/{name}"] = script
    lines = []
    for file, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{file},sha256={digest},{len(text)}\n")
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, f"{about}/RECORD": "".join([*lines, f"{about}/RECORD,,\n"])}.items():
            entry = zipfile.ZipInfo(file)
            entry.external_attr = 0o100755 << 16  # or a script cannot be run
            archive.writestr(entry, text)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    return pins.Pin(name=name, version=version, marker="", hashes=(found,), via=("clinrl",), licence="MIT")


def project(folder: Path, uv: str, environment: str = ".venv") -> dict[str, str]:
    """A project with this Makefile and a few tiny libraries, in which `uv` does what the script says."""
    wheels = folder / "wheels"
    wheels.mkdir()
    main = [wheel(wheels, "uv", "1.0", uv), wheel(wheels, "setuptools", "1.0"), wheel(wheels, "small", "1.0")]
    shutil.copy(ROOT / "Makefile", folder)
    (folder / pins.MAIN).write_text("".join(map(str, main)))
    (folder / pins.TORCH).write_text(str(wheel(wheels, "torch", "1.0")))
    (folder / pins.CPU).write_text(str(wheel(wheels, "torch", "1.0+cpu")))
    (folder / pins.VLLM).write_text("".join(map(str, [*main, wheel(wheels, "engine", "1.0")])))
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tiny"\nversion = "1.0"\n'
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / environment], check=True)
    (folder / "lent").mkdir()  # pip of this environment: to install one takes longer than all the rest
    (folder / "lent/pip").symlink_to(Path(find_spec("pip").origin).parent)
    pip = folder / environment / "bin/pip"
    pip.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}/lent" exec "{folder}/{environment}/bin/python" -m pip "$@"\n')
    pip.chmod(0o755)
    unset = (
        "UV_FIND_LINKS",
        "UV_DEFAULT_INDEX",
        "PIP_INDEX_URL",
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "MAKEFLAGS",
        "MAKELEVEL",
    )
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "UV_OFFLINE": "1"}
    offline["PIP_INDEX_URL"] = "http://127.0.0.1:9/simple"
    return inherited | offline | {"UV_CACHE_DIR": str(folder / "cache")}


def make(
    folder: Path, environment: dict[str, str], target: str = ".venv/.installed"
) -> subprocess.CompletedProcess[str]:
    command = ["make", target, f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def installed(folder: Path, environment: str = ".venv") -> set[str]:
    return {path.name for path in folder.glob(f"{environment}/lib/python3.*/site-packages/*_module.py")}


REAL_UV = f'#!/bin/sh\nexec "{find_uv_bin()}" "$@"\n'
BROKEN_UV = "#!/bin/sh\nexit 1\n"


@pytest.mark.long
def test_what_has_no_hash_is_not_installed(tmp_path: Path) -> None:
    environment = project(tmp_path, REAL_UV)
    main = tmp_path / pins.MAIN
    sound = main.read_text()
    main.write_text(sound.replace(str(pins.read(sound)[2]), "small==1.0\n"))
    refused = make(tmp_path, environment)
    assert refused.returncode != 0
    assert "error: In `--require-hashes` mode" in refused.stderr  # uv's words; pip, which then tries, has others
    assert "small_module.py" not in installed(tmp_path)
    assert not (tmp_path / ".venv/.installed").exists()

    main.write_text(sound)
    done = make(tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert installed(tmp_path) == {"small_module.py", "setuptools_module.py", "torch_module.py", "uv_module.py"}
    assert [*tmp_path.glob(".venv/lib/python3.*/site-packages/torch-1.0+cpu.dist-info")]


@pytest.mark.long
def test_the_environment_of_vllm_has_the_libraries_of_its_own_file(tmp_path: Path) -> None:
    environment = project(tmp_path, REAL_UV, ".venv-vllm")
    vllm = tmp_path / pins.VLLM
    sound = vllm.read_text()
    vllm.write_text(sound.replace(pins.read(sound)[3].hashes[0], "0" * 64))
    assert make(tmp_path, environment, "vllm").returncode != 0
    assert not (tmp_path / ".venv-vllm/.installed").exists()

    vllm.write_text(sound)
    done = make(tmp_path, environment, "vllm")
    assert done.returncode == 0, done.stderr
    own = {"small_module.py", "setuptools_module.py", "engine_module.py", "uv_module.py"}
    assert installed(tmp_path, ".venv-vllm") == own, "torch would be in the file, and comes from no other"
    assert not (tmp_path / ".venv").exists()
    assert "up to date" in make(tmp_path, environment, "vllm").stdout


def without_uv(folder: Path) -> dict[str, str]:
    """A project in which uv fails and no wheel is built for the CPU."""
    environment = project(folder, BROKEN_UV)
    (folder / "wheels/torch-1.0+cpu-py3-none-any.whl").unlink()
    return environment


@pytest.mark.long
def test_what_has_another_hash_is_not_installed_where_uv_fails(tmp_path: Path) -> None:
    """By pip, which takes the build of torch that PyPI has where no wheel is for the CPU; it has the wrong hash."""
    environment = without_uv(tmp_path)
    torch = tmp_path / pins.TORCH
    torch.write_text(torch.read_text().replace(pins.read(torch.read_text())[0].hashes[0], "0" * 64))
    refused = make(tmp_path, environment)
    assert refused.returncode != 0
    assert "DO NOT MATCH" in refused.stderr
    assert installed(tmp_path) == {"setuptools_module.py", "uv_module.py"}


@pytest.mark.slow
def test_where_uv_fails_pip_installs_all_and_the_torch_that_pypi_has(tmp_path: Path) -> None:
    done = make(tmp_path, without_uv(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "small_module.py" in installed(tmp_path)
    assert [*tmp_path.glob(".venv/lib/python3.*/site-packages/torch-1.0.dist-info")]


def test_every_installation_in_the_makefile_demands_hashes() -> None:
    text = (ROOT / "Makefile").read_text()
    recipe = text.split("\n$(READY):")[1]
    assert 'hashed="-q --no-deps --require-hashes"' in recipe
    lines = [line for line in recipe.splitlines() if re.search(r'"\$\$@"|pip install .*-r', line)]
    assert lines
    assert all(line.count("$$hashed") == line.count(" -r ") for line in lines)


def test_the_licence_is_declared_and_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE", "NOTICE"]
    assert "Apache License\n" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_notice_names_every_file_of_others() -> None:
    """Chat templates came with TRL and are in git with each base; the notice says whose they are."""
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    templates = [path for path in tracked if path.endswith(".jinja")]
    assert templates
    assert all(path in notice for path in templates)


def test_the_notice_names_every_library_that_asks_to_share_alike() -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    asking = {pin.name for pin in pins.load() if re.search(r"GPL|MPL|EPL", pin.licence)}
    assert asking
    for name in asking:
        assert re.search(rf"^  {re.escape(name)} ", notice, re.MULTILINE), name
