"""constraints.txt and the files beside it: every library, every hash, every licence."""

import errno
import shutil
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from license_expression import get_spdx_licensing
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from uv import find_uv_bin

from clinrl.errors import DataError
from clinrl.provenance import pins
from clinrl.provenance.pins import Pin
from clinrl.runtime import determinism

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
FILES = {pins.MAIN: pins.DEFAULT, pins.VLLM: (pins.VLLM,)}
"""The files of each environment, by the one that `pins.EXTRAS` knows it by."""
LEFT_OUT = {"gradio"}
"""What pyproject.toml tells uv to leave out."""
HEX = st.binary(min_size=32, max_size=32).map(bytes.hex)
NAME = st.sampled_from(["torch", "zc-lockfile", "x", "in-toto", "9p"])
PIN = st.builds(
    Pin,
    name=NAME,
    version=st.sampled_from(["1.0", "2026.11.15", "2.9.0.post0", "2.13.0+cpu"]),
    marker=st.sampled_from(["", "sys_platform == 'linux'", "python_full_version >= '3.13'"]),
    hashes=st.sets(HEX, min_size=1, max_size=2).map(lambda found: tuple(sorted(found))),
    via=st.sets(NAME, min_size=1, max_size=2).map(lambda found: tuple(sorted(found))),
    licence=st.sampled_from(["MIT", "Apache-2.0 OR MIT", pins.UNKNOWN]),
)


def pin(version: str = "1.0", **changes: object) -> Pin:
    made = Pin(name="torch", version=version, marker="", hashes=("a" * 64,), via=("clinrl",), licence=pins.UNKNOWN)
    return made._replace(**changes)


def test_the_committed_files_are_what_their_pins_say() -> None:
    pinned = {(ROOT / name).read_text(encoding="utf-8") for name in pins.HEADERS}
    found = {name: [pin for pin in pins.load() if pins._file(pin) == name] for name in pins.DEFAULT}
    found[pins.VLLM] = pins.load(names=[pins.VLLM])
    assert {header + "\n" + "".join(map(str, found[name])) for name, header in pins.HEADERS.items()} == pinned


def pinned_here(environment: str) -> dict[str, str]:
    """The version of each library that an environment has on this platform."""
    found = [pin for pin in pins.load(names=FILES[environment]) if not pin.marker or Marker(pin.marker).evaluate()]
    return {pin.name: pin.version for pin in found if "+" not in pin.version}


@pytest.mark.long
@pytest.mark.parametrize("environment", FILES)
def test_everything_that_is_asked_for_is_pinned(environment: str) -> None:
    """From pyproject.toml on, through what each installed library asks for: so that no installer has to resolve."""
    pinned = pinned_here(environment)
    asked = [*PYPROJECT["build-system"]["requires"], *PYPROJECT["project"]["dependencies"]]
    for extra in pins.EXTRAS[environment]:
        asked += EXTRAS[extra]
    open_, seen = [(Requirement(line), "pyproject.toml") for line in asked], set()
    while open_:
        wanted, who = open_.pop()
        name = canonicalize_name(wanted.name)
        if name in LEFT_OUT or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        assert name in pinned, f"{who} asks for {name}, which is not pinned; run `make lock`"
        assert wanted.specifier.contains(pinned[name], prereleases=True), f"{who} asks for {wanted}; run `make lock`"
        for extra in {"", *wanted.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                open_ += [(need, name) for need in needs(name, pinned[name], extra)]


def needs(name: str, version: str, extra: str) -> list[Requirement]:
    """What a library asks for at this version; nothing of one that is not installed here."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return []
    if found.version.split("+")[0] != version:
        return []
    lines = [Requirement(line) for line in found.requires or []]
    for need in lines:
        if need.marker and need.marker.evaluate({"extra": extra}):
            need.marker = None
    return lines


def test_every_extra_is_pinned_and_none_beside_one_that_it_conflicts_with() -> None:
    assert set().union(*pins.EXTRAS.values()) == set(EXTRAS)
    conflicts = [{entry["extra"] for entry in conflict} for conflict in PYPROJECT["tool"]["uv"]["conflicts"]]
    assert conflicts == [{"flows", "vllm"}]
    assert not [extras for extras in pins.EXTRAS.values() for conflict in conflicts if conflict <= {*extras}]
    names = {environment: {pin.name for pin in pins.load(names=files)} for environment, files in FILES.items()}
    assert {"prefect"} == {"prefect", "vllm"} & names[pins.MAIN]
    assert {"vllm"} == {"prefect", "vllm"} & names[pins.VLLM]


def test_both_environments_have_the_same_of_what_a_manifest_records() -> None:
    main, vllm = pinned_here(pins.MAIN), pinned_here(pins.VLLM)
    assert {name: main[name] for name in determinism._VERSIONS} == {name: vllm[name] for name in determinism._VERSIONS}


@pytest.fixture(scope="module")
def _index() -> None:
    command = [find_uv_bin(), "pip", "compile", "--quiet", "--no-deps", "-"]
    done = subprocess.run(command, input="trl==1.16.0", capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("uv cannot reach a package index here, so it resolves nothing")


@pytest.mark.slow
@pytest.mark.usefixtures("_index")
@pytest.mark.parametrize("extras", [("flows",), ("gpu",), ("vllm",), *pins.EXTRAS.values()], ids=",".join)
def test_uv_finds_versions_for_each_set_of_extras(extras: tuple[str, ...]) -> None:
    found = {pin.name for pin in pins.read(pins._resolve(extras, pins.load(), ()))}
    wanted = {"flows": "prefect", "gpu": "flash-linear-attention", "vllm": "vllm"}
    assert {extra for extra, library in wanted.items() if library in found} == wanted.keys() & {*extras}


@pytest.mark.slow
@pytest.mark.usefixtures("_index")
def test_the_conflict_that_is_declared_is_one(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="uv found no set of versions"):
        pins._resolve(("flows", "vllm"), pins.load(), ())
    assert "fastapi" in capfd.readouterr().err


def test_what_is_installed_has_the_pinned_version() -> None:
    for found in pins.load():
        try:
            installed = distribution(found.name).version
        except PackageNotFoundError:  # of another platform
            continue
        assert installed.split("+")[0] == found.version.split("+")[0], found.name


def test_every_licence_is_an_spdx_expression() -> None:
    spdx = get_spdx_licensing()
    stated = {pin.licence for pin in pins.load()}
    assert pins.UNKNOWN not in stated
    for licence in stated:
        if not licence.startswith("LicenseRef-"):
            assert not spdx.validate(licence).errors, licence


@given(st.lists(PIN, max_size=3))
def test_what_is_written_is_read(written: list[Pin]) -> None:
    assert pins.read("# header\n\n" + "".join(map(str, written))) == written


@given(st.text())
def test_any_other_text_is_refused_or_holds_pins(text: str) -> None:
    try:
        found = pins.read(text)
    except DataError:
        return
    assert all(pin.hashes for pin in found)


@pytest.mark.parametrize(
    "line",
    [
        "trl==1.16.0",
        "trl==1.16.0\n    # via clinrl",
        "-e .",
        "trl>=1 \\\n    --hash=sha256:" + "a" * 64,
        "--hash=md5:00",
    ],
)
def test_a_line_without_a_hash_is_refused(line: str) -> None:
    with pytest.raises(DataError, match="make lock"):
        pins.read(f"{pin()}{line}\n")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"constraints\.txt is missing"):
        pins.load(tmp_path)


def test_a_build_from_elsewhere_stands_beside_that_of_the_index() -> None:
    resolved = [pin(marker="sys_platform == 'linux'", licence="MIT")]
    wheel = pins.merge_pins(resolved, [], {("torch", "1.0+cpu"): "c" * 64})
    assert [(found.version, found.hashes, found.marker) for found in wheel] == [
        ("1.0", ("a" * 64,), "sys_platform == 'linux'"),
        ("1.0+cpu", ("c" * 64,), ""),
    ]
    assert pins.merge_pins(resolved, wheel, {}) == wheel  # a machine without the wheel keeps it


def test_a_build_of_another_version_is_dropped() -> None:
    former = [pin("1.0"), pin("1.0+cpu")]
    assert [found.version for found in pins.merge_pins([pin("2.0")], former, {("torch", "1.0+cpu"): "c" * 64})] == [
        "2.0"
    ]


def test_a_licence_that_a_library_does_not_state_stays_as_somebody_wrote_it() -> None:
    unheard = pin(name="a-library-that-is-not-installed")
    assert pins.merge_pins([unheard], [], {})[0].licence == pins.UNKNOWN
    assert pins.merge_pins([unheard], [unheard._replace(licence="MIT")], {})[0].licence == "MIT"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of the four files, in which uv resolves to what the first and the last hold."""
    for name in pins.HEADERS:
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.setattr(pins, "ROOT", tmp_path)
    monkeypatch.setattr(pins.load, "__defaults__", (tmp_path, pins.DEFAULT))
    texts = {pins.EXTRAS[name]: (ROOT / name).read_text(encoding="utf-8") for name in (pins.MAIN, pins.VLLM)}
    monkeypatch.setattr(pins, "_resolve", lambda extras, _known, _words: texts[extras])
    return tmp_path


@pytest.mark.long
def test_what_is_resolved_again_is_written_again(checkout: Path) -> None:
    """But for torch, of which the checkout's uv says nothing. The vLLM file keeps what was written of licences."""
    vllm = checkout / pins.VLLM
    sound = vllm.read_text()
    vllm.write_text(sound.replace(f"licence: {pins.UNKNOWN}", "licence: BSD-2-Clause", 1))
    assert pins.main(["--wheels"]) == 0
    assert (checkout / pins.MAIN).read_bytes() == (ROOT / pins.MAIN).read_bytes()
    assert vllm.read_text() == sound.replace(f"licence: {pins.UNKNOWN}", "licence: BSD-2-Clause", 1)


def test_a_refusal_names_the_file_that_is_damaged(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in pins.HEADERS:
        sound = (checkout / name).read_text()
        for damage in (b"-e .\n", b"\xff\n"):
            (checkout / name).write_bytes(sound.encode() + damage)
            assert pins.main(["--wheels"]) == 1
            said = capsys.readouterr().err
            assert said.startswith(f"clinrl: {name} ")
            assert f"`git checkout {name}`" in said
        (checkout / name).write_text(sound)


def test_what_uv_says_is_not_taken_for_a_file(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pins, "_resolve", lambda *_: "trl==1\n")
    assert pins.main(["--wheels"]) == 1
    assert capsys.readouterr().err.startswith("clinrl: what uv resolved has a line without a version, a hash")


def test_a_wheel_with_an_odd_name_is_a_sentence(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "odd.whl").write_bytes(b"")
    assert pins.main(["--wheels", str(checkout)]) == 1
    assert capsys.readouterr().err == (
        f"clinrl: {checkout}/odd.whl has no name of a wheel; rename it or move it away; nothing was written\n"
    )


def test_a_full_disk_is_a_sentence(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(pins, "write_text", full)
    assert pins.main(["--wheels"]) == 1
    assert capsys.readouterr().err.startswith(f"clinrl: disk is full at {checkout}/constraints.txt: ")
