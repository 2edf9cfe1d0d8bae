"""The pinned libraries: the version of each, the hashes of its files on the package index, and its licence.

There are two environments, since Prefect and vLLM want different libraries. For `.venv`, `constraints.txt` pins all but
torch, which has two builds: that of PyPI (`constraints-torch.txt`, with the libraries that it needs for NVIDIA's GPUs)
and one for the CPU (`constraints-torch-cpu.txt`). `constraints-vllm.txt` pins all libraries of `.venv-vllm`. Only
`make lock` writes these four files; it asks uv. Installers read them as requirements and check the hashes.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import NamedTuple

from clinrl.artifacts import sha256_file, write_text
from clinrl.errors import DataError, with_exit_code

MAIN, TORCH, CPU = "constraints.txt", "constraints-torch.txt", "constraints-torch-cpu.txt"
DEFAULT = (MAIN, TORCH, CPU)
"""The files of `.venv`: the libraries of a release."""
VLLM = "constraints-vllm.txt"
"""The file of `.venv-vllm`, an optional environment for machines with a GPU. It is in no bill of materials."""
EXTRAS = {
    MAIN: ("pipeline", "flows", "servers", "reward-models", "openenv", "docs", "dev"),
    VLLM: ("pipeline", "vllm", "gpu", "reward-models", "dev"),
}
"""The extras of pyproject.toml that are pinned together, by the file that holds them."""
ROOT = Path(__file__).resolve().parents[3]
"""The checkout that this code is in: its libraries are pinned there."""
UNKNOWN = "NOASSERTION"
"""The placeholder for the licence of a new library that names none in SPDX's terms. The real one is added by hand."""
LIBRARIES = (
    "accelerate", "cryptography", "mlflow", "numpy", "pandas", "peft", "pydantic", "safetensors", "tokenizers", "torch",
    "transformers",
)  # fmt: skip
"""The libraries that a registered model imports to answer. clinrl itself travels with the model."""
QUANTISED = "bitsandbytes"
"""The library that a registered model also needs if its base is held in four bits."""
OF_TORCH = re.compile(r"(cuda|nvidia)-|(torch|triton)$")
HEADERS = {
    MAIN: """\
# Every library but torch, with the hashes of its files on PyPI, who needs it, and its licence (SPDX). The committed
# reports were made with these versions. Renew: make lock
""",
    TORCH: """\
# torch as PyPI has it, with what it needs for NVIDIA's GPUs, in the form of constraints.txt. Renew: make lock
""",
    CPU: """\
# torch built for the CPU alone, in place of constraints-torch.txt: the wheel that lay in PIP_FIND_LINKS at `make lock`.
""",
    VLLM: f"""\
# Every library of .venv-vllm, torch among them, in the form of constraints.txt. {UNKNOWN}: the licence was not
# looked up, since the library is no part of a release. Renew: make lock
""",
}
RESOLVED = ("what uv resolved", "nothing was written; see what changed in uv")
BLOCK = re.compile(
    r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?: ; (?P<marker>.+?))?"
    r"(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n"
    r"    # via (?P<via>.+)\n(?:    # licence: (?P<licence>.+)\n)?",
    re.MULTILINE,
)


class Pin(NamedTuple):
    """One library at one version."""

    name: str
    """The name as PyPI normalises it."""
    version: str
    marker: str
    """Where it is installed, as a PEP 508 marker; empty: everywhere."""
    hashes: tuple[str, ...]
    """SHA-256 of every file that may be installed, in hexadecimal."""
    via: tuple[str, ...]
    """Its dependents: libraries, or `clinrl`."""
    licence: str
    """An SPDX expression."""

    def __str__(self) -> str:
        marker = f" ; {self.marker}" if self.marker else ""
        hashes = "".join(f" \\\n    --hash=sha256:{found}" for found in self.hashes)
        via = ", ".join(self.via)
        return f"{self.name}=={self.version}{marker}{hashes}\n    # via {via}\n    # licence: {self.licence}\n"


def read(text: str, source: str = MAIN, advice: str = "") -> list[Pin]:
    """The pins of a file. Raises DataError, naming `source` and what to do, if a line belongs to no pin."""
    pins = [
        Pin(
            name=found["name"],
            version=found["version"],
            marker=found["marker"] or "",
            hashes=tuple(sorted(re.findall(r"[0-9a-f]{64}", found["hashes"]))),
            via=tuple(sorted({word.split(" (")[0] for word in found["via"].split(", ")})),
            licence=found["licence"] or UNKNOWN,
        )
        for found in BLOCK.finditer(text)
    ]
    rest = [line for line in BLOCK.sub("", text).splitlines() if line and not line.startswith("#")]
    if rest:
        advice = advice or f"restore it with `git checkout {source}`; only `make lock` writes it"
        raise DataError(f"{source} has a line without a version, a hash or who needs it: {rest[0][:80]}; {advice}")
    return pins


def load(folder: Path = ROOT, names: Iterable[str] = DEFAULT) -> list[Pin]:
    """The pins of the files with these names, by library. Raises DataError if a file is missing or malformed."""
    found = []
    for name in names:
        try:
            found += read((folder / name).read_text(encoding="utf-8"), name)
        except FileNotFoundError as error:
            raise DataError(f"{error.filename} is missing; restore it with `git checkout`") from None
        except UnicodeDecodeError:
            raise DataError(f"{name} is no text; restore it with `git checkout {name}`") from None
    return sorted(found)


def merge_pins(resolved: Iterable[Pin], former: Iterable[Pin], built: Mapping[tuple[str, str], str]) -> list[Pin]:
    """The pins that uv resolved, with licences, and beside them the builds that are not on PyPI.

    `built` has the hashes of local wheels by name and full version, such as 2.13.0+cpu. A build that was pinned before
    stays as long as its version does, so that a machine without the wheel does not lose it.
    """
    before = {(pin.name, pin.version): pin for pin in former}
    licences = {pin.name: pin.licence for pin in before.values()}
    pins = []
    for pin in resolved:
        mine = pin._replace(licence=_licence_of(pin) or licences.get(pin.name, UNKNOWN))
        builds = {version: found for (name, version), found in built.items() if name == pin.name and "+" in version}
        for name, version in before:
            if name == pin.name and "+" in version:
                builds.setdefault(version, before[name, version].hashes[0])
        pins.append(mine)
        pins += [
            mine._replace(version=version, marker="", hashes=(found,))
            for version, found in builds.items()
            if version.split("+")[0] == pin.version
        ]
    return sorted(pins)


def _file(pin: Pin) -> str:
    if "+" in pin.version:
        return CPU
    return TORCH if OF_TORCH.match(pin.name) else MAIN


@with_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Renew the files. Arguments that are not known here go to `uv pip compile`, such as `--upgrade-package trl`."""
    parser = argparse.ArgumentParser(prog="python -m clinrl.provenance.pins", description=__doc__, allow_abbrev=False)
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    parser.add_argument("--wheels", nargs="*", type=Path, default=folders, metavar="FOLDER", help="of local wheels")
    arguments, uv_options = parser.parse_known_args(argv)
    former, beside = load(), load(names=[VLLM])
    resolved = read(_resolve(EXTRAS[MAIN], former, uv_options), *RESOLVED)
    pins = merge_pins(resolved, former, _built(map(Path, arguments.wheels)))
    # The libraries of .venv go first, so that both environments have the same where they can.
    known = [*(pin for pin in pins if "+" not in pin.version), *beside]
    others = merge_pins(read(_resolve(EXTRAS[VLLM], known, uv_options), *RESOLVED), known[::-1], {})
    written = {name: [pin for pin in pins if _file(pin) == name] for name in DEFAULT} | {VLLM: others}
    for name, header in HEADERS.items():
        write_text(ROOT / name, header + "\n" + "".join(map(str, written[name])))
    if unknown := [pin.name for pin in pins if pin.licence == UNKNOWN]:
        print(f"write the licences of {', '.join(unknown)} into {MAIN}", file=sys.stderr)
    return 0


def _resolve(extras: Iterable[str], known: Iterable[Pin], uv_options: Sequence[str]) -> str:
    """The requirements that uv resolves from pyproject.toml with these extras, for every platform.

    uv keeps the first known pin that fits. Raises DataError if uv finds no solution.
    """
    from uv import find_uv_bin

    # uv would pin local wheels in place of PyPI's files, and other machines do not have these wheels.
    environment = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / MAIN
        out.write_text("".join(str(pin) for pin in known if "+" not in pin.version), encoding="utf-8")
        command = [
            *(find_uv_bin(), "pip", "compile", "pyproject.toml", "--quiet", "--universal", "--python-version=3.11"),
            *("--generate-hashes", "--no-header", "--annotation-style=line", f"--output-file={out}"),
            *(f"--extra={extra}" for extra in extras),
        ]
        done = subprocess.run([*command, *uv_options], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            raise DataError("uv found no set of versions, and says why above; nothing was written")
        return out.read_text(encoding="utf-8")


def _built(folders: Iterable[Path]) -> dict[tuple[str, str], str]:
    """The hashes of wheels in folders, by normalised name and version. Raises DataError for a malformed file name."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    found: dict[tuple[str, str], str] = {}
    for wheel in sorted(wheel for folder in folders for wheel in folder.glob("*.whl")):
        try:
            name, version, _, _ = parse_wheel_filename(wheel.name)
        except InvalidWheelFilename:
            raise DataError(f"{wheel} has no name of a wheel; rename it or move it away; nothing was written") from None
        found[name, str(version)] = sha256_file(wheel)
    return found


def _licence_of(pin: Pin) -> str | None:
    """The SPDX expression of an installed library; None if it states none, or if this version is not installed."""
    try:
        about = metadata(pin.name)
    except PackageNotFoundError:
        return None
    is_pinned = about["Version"].split("+")[0] == pin.version
    return about["License-Expression"] if is_pinned and "License-Expression" in about else None


if __name__ == "__main__":
    sys.exit(main())
