"""A dossier states what its artefacts state, or that nobody made them; a number that differs stops it."""

import json
import re
import shutil
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest

import examined
from clinrl import paths
from clinrl.artifacts import seal, staged, write_json
from clinrl.cli import main as cli
from clinrl.config.params import load_params
from clinrl.errors import ArtefactError, ParamsError
from clinrl.provenance.cited import Cited, Record
from clinrl.release import decisions, dossier
from clinrl.reports.render import page

pytestmark = pytest.mark.usefixtures("few_draws")

ROOT = Path(__file__).resolve().parents[2]
PARAMS = Path("params.yaml")
FILES = {*(f"{paper}.md" for paper in dossier.PAPERS), dossier.HTML, dossier.NUMBERS}
THINK = "data/reports/esi-v49/think.json"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The parameters of a project with v1, v2 and v3, in whose folder the test works."""
    examined.copy(examined.registered(), tmp_path)
    monkeypatch.chdir(tmp_path)
    return load_params(PARAMS)


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """The parameters of this repository, in a folder with its reports, parameters and lock, as a clone has them."""
    for name in ("data/reports", "data/bases/esi", "params", "params.yaml", "dvc.lock", "bom.cdx.json"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return load_params(PARAMS)


def pages(name: str) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in paths.dossier(name).iterdir()}


def test_at_full_scale_a_shape_or_a_setting_of_the_base_is_compared_with_the_manifest(committed):
    file = Path("params/esi.yaml")
    file.write_text(file.read_text().replace("&live {", "&live {steps: 7, "))
    full = committed.model_copy(update={"scale": "full"})
    states = {
        other[1:]: one[1:] for one, other in dossier._pairs(Cited({}), full, PARAMS, "esi-v49") if "esi-v49" in other[0]
    }
    assert states["spec", "lora", "rank"] == ("bases", "esi", "full", "lora", "rank")
    recipe = ("profiles", "esi-fifth-rule-aware", "trainer", "full")
    assert states["spec", "trainer", "prompts"] == (*recipe, "prompts")
    assert ("spec", "trainer", "steps") not in states
    targets = load_params(PARAMS).bases["esi"].full.lora.targets
    listed = re.search(r"targets: \[(.*)\]}", Path("params/esi.yaml").read_text())[1].split(", ")
    assert [listed[int(states["spec", "lora", "targets", str(at)][-1])] for at in range(len(listed))] == [*targets]
    assert listed != [*targets], "a manifest has them sorted"


def edit(file: str | Path, *keys: str, value: object) -> None:
    """Put another value into a JSON file, and leave everything else as it is."""
    content = json.loads(Path(file).read_text(encoding="utf-8"))
    place = content
    for key in keys[:-1]:
        place = place[int(key) if isinstance(place, list) else key]
    place[keys[-1]] = value
    write_json(Path(file), content)


def test_a_version_has_every_paper_and_each_value_its_file_and_digest(project, capsys):
    decision = decisions.decide(project, "v1")
    examined.promote(project, "v1", "Ada | <b>Lovelace</b>", decision)
    assert decisions.decide(project, "v1").champion == "v1", "the champion is decided again"
    dossier.stage(project, PARAMS, "v1")
    written = pages("v1")
    assert "Champion before: v1" not in written["change-control.md"]
    assert set(written) == FILES
    assert capsys.readouterr().out.split() == [str(paths.dossier("v1") / name) for name in written_order(written)]
    record = Record.model_validate_json(written[dossier.NUMBERS])
    for file, digest in record.files.items():
        assert f"| {file} | {digest} |" in written["README.md"] + written["annex-iv.md"] + written["change-control.md"]
        assert f"<td>{file}</td><td><code>{digest}</code></td>" in written[dossier.HTML]
    think = json.loads((paths.report("v1") / "think.json").read_text())
    exact = think["metrics"]["exact"]
    (mark,) = re.findall(r"\| (S\d+) \| data/reports/v1/think.json", written["README.md"])
    shown = f"{exact['value']:.4f} [{exact['low']:.4f}, {exact['high']:.4f}], n {exact['n']} [{mark}]"
    assert f"| exact | {shown} |" in written["README.md"]
    assert "severe_pain: 0.5" in written["change-control.md"], "the gap that was planted"
    assert "| shape of the adapter | alpha: 8, rank: 4, targets: all-linear [S" in written["annex-iv.md"]
    assert r"Ada &#124; \<b\>Lovelace\</b\>" in written["change-control.md"]
    assert "Ada | &lt;b&gt;Lovelace&lt;/b&gt;" in written[dossier.HTML]
    assert "promote, yes" in written["change-control.md"]
    dossier.stage(project, PARAMS, "v1", check=True)
    paths.AUDIT_LOG.write_text(paths.AUDIT_LOG.read_text().replace('"promote":true', '"promote":false', 1))
    with pytest.raises(ArtefactError, match=r"decisions\.jsonl"):
        dossier.stage(project, PARAMS, "v1")


def written_order(written: dict[str, str]) -> list[str]:
    return sorted(written, key=[*(f"{paper}.md" for paper in dossier.PAPERS), dossier.HTML, dossier.NUMBERS].index)


@pytest.mark.long
def test_every_value_is_what_its_file_says_at_its_key(committed):
    """The record is followed with a reader of its own."""
    dossier.stage(committed, PARAMS, "esi-v49")
    record = Record.model_validate_json(pages("esi-v49")[dossier.NUMBERS])
    found = 0
    for value in record.values:
        if value.file.endswith(".json"):
            held = json.loads(Path(value.file).read_text(encoding="utf-8"))
            for key in value.key.split("/")[1:]:
                key = key.replace("~1", "/").replace("~0", "~")
                held = held[int(key) if isinstance(held, list) else key]
            assert held == value.value
            found += 1
    assert found > 1000


@pytest.mark.long
def test_the_committed_reports_make_the_same_bytes_twice_and_no_time_is_in_them(committed, tmp_path):
    dossier.stage(committed, PARAMS, "esi-v49")
    dossier.stage(committed, PARAMS, "esi-v49", out=tmp_path / "again")
    first = pages("esi-v49")
    assert first == {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "again").iterdir()}
    assert not re.search(r"\b20\d\d-\d\d-\d\d", "".join(first.values()))


def test_a_folder_with_anything_else_is_not_written_over(project, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/README.md").write_text("mine")
    for name, folder in (("v1", tmp_path / "notes"), ("v2", tmp_path / "papers")):
        dossier.stage(project, PARAMS, "v1", out=tmp_path / "papers")
        with pytest.raises(ParamsError, match=f"holds something else than a dossier of {name}"):
            dossier.stage(project, PARAMS, name, out=folder)
    assert (tmp_path / "notes/README.md").read_text() == "mine"


@pytest.mark.long
def test_a_dossier_that_says_not_here_is_written_and_is_no_success(committed, capsys):
    assert cli.main(["dossier", "esi-v49"]) == 1
    assert "| adapter, its manifest | not here; `dvc repro` builds it" in pages("esi-v49")["README.md"]
    said = capsys.readouterr().err
    assert "is not complete: data/adapters/esi-v49/manifest.json, as dvc.lock records it, is not here" in said
    assert "`dvc repro evaluate@esi-v49`" in said
    Path("dvc.lock").unlink()
    assert cli.main(["dossier", "esi-v49"]) == 0


@pytest.mark.long
def test_a_missing_artefact_is_said_to_be_not_done(committed):
    shutil.rmtree(paths.report("esi-v49-5"))
    Path("dvc.lock").unlink()
    dossier.stage(committed, PARAMS, "esi-v49")
    assert "| training repeated with other seeds | in 5 versions |" in pages("esi-v49")["README.md"]
    assert "| exam on cases from elsewhere | not done |" in pages("esi-v49")["README.md"]
    dossier.stage(committed, PARAMS, "esi-v49-5")
    written = pages("esi-v49-5")
    assert "| all | not done | not done |" in written["README.md"]
    dossier.stage(committed, PARAMS, "esi-v48")
    assert "| training repeated with other seeds | not done |" in pages("esi-v48")["README.md"]
    assert "Mean cost of an answer: not done." in written["change-control.md"]
    assert "The gate's decision on this version: not done." in written["change-control.md"]


@pytest.mark.long
def test_reward_and_registered_test_are_those_of_the_artefacts(committed):
    dossier.stage(committed, PARAMS, "audit-v2")
    written = pages("audit-v2")
    probe = json.loads(paths.probe_proof("audit-v2").read_text())
    assert f"Reward: corrected: (beta: {probe['reward']['corrected']['beta']}," in written["tripod-llm.md"]
    (first, _) = json.loads(paths.comparison_report("audit-arms").read_text())["primary"]["tests"]
    assert "## Result: dangerous, v3 against base\n" in written["preregistration.md"]
    assert re.search(
        rf"{first['difference']['value']:.4f} .* \| {first['adjusted']} \[S\d+\] \|", written["preregistration.md"]
    )
    assert "not done" not in written["preregistration.md"].partition("## Result")[2]


@pytest.mark.long
def test_plan_and_preregistration_are_shown_as_soon_as_there_are_any(committed):
    dossier.stage(committed, PARAMS, "imaging-labels-1")
    before = pages("imaging-labels-1")
    assert re.search(r"\| exam \| imaging-x2 \[S\d+\] \|", before["change-control.md"])
    assert "was registered: not done." in before["preregistration.md"]
    write_json(paths.preregistration("imaging-arms"), {"measure": "macro_f1", "seeds": {"imaging-labels-1": 1}})
    dossier.stage(committed, PARAMS, "imaging-labels-1")
    after = pages("imaging-labels-1")
    assert re.search(r"\| screen \| 0.05 \[S\d+\] \|", after["change-control.md"])
    assert re.search(r"\| measure \| macro_f1 \[S\d+\] \|", after["preregistration.md"])


@pytest.mark.long
@pytest.mark.parametrize("keys", [("metrics", "exact", "value"), ("slices", "rule", "acs", "critical_under", "n")])
def test_an_altered_number_stops_the_check_with_file_key_and_both_values(committed, keys):
    dossier.stage(committed, PARAMS, "esi-v49")
    edit(THINK, *keys, value=0.5)
    with pytest.raises(ArtefactError) as refused:
        dossier.stage(committed, PARAMS, "esi-v49", check=True)
    said = str(refused.value)
    assert all(part in said for part in (THINK, "/" + "/".join(keys), "0.5"))
    assert re.search(r"has (0\.\d+|\d+) at", said)


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "keys", "value", "other"),
    [
        (THINK, ("metrics", "exact", "value"), 0.99, "data/reports/esi-v49/summary.json"),
        ("data/reports/esi-v49/summary.json", ("mode_agreement",), 0.9, "data/reports/esi-v49/between_modes.json"),
        (THINK, ("n",), 801, "data/reports/esi-v49/direct.json"),
        ("data/reports/mine/esi-v49.json", ("adapter_digest",), "0" * 64, THINK),
        ("data/reports/probe/esi-v46.json", ("seed",), 47, "params/esi.yaml"),
        ("data/reports/probe/esi-v49.json", ("reward", "unreadable"), -1.0, "params/esi.yaml"),
        ("data/reports/data/esi-d3.json", ("data", "identity"), "0" * 64, "data/reports/probe/esi-v43.json"),
    ],
)
def test_two_artefacts_that_state_a_number_differently_stop_it(committed, file, keys, value, other):
    edit(file, *keys, value=value)
    with pytest.raises(ArtefactError) as refused:
        dossier.stage(committed, PARAMS, "esi-v49")
    assert all(part in str(refused.value) for part in (file, other, repr(value), "/" + "/".join(keys)))
    assert not paths.dossier("esi-v49").exists()


def test_a_report_that_dvc_lock_does_not_record_stops_it(committed):
    edit(THINK, "slices", "rule", "acs", "critical_under", "value", value=0.25)
    with pytest.raises(ArtefactError, match=f"{THINK} is not what dvc.lock records"):
        dossier.stage(committed, PARAMS, "esi-v49")


def test_a_lock_that_cannot_be_read_stops_it_and_is_not_taken_for_none(committed):
    Path("dvc.lock").write_text("stages: [", encoding="utf-8")
    with pytest.raises(ArtefactError, match=r"dvc\.lock is not a lock file"):
        dossier.stage(committed, PARAMS, "esi-v49")


@pytest.mark.long
def test_a_recipe_edited_after_the_training_stops_it(committed):
    file = Path("params/esi.yaml")
    file.write_text(file.read_text().replace("lr: 5.0e-4, steps: 60", "lr: 5.0e-4, steps: 61"))
    with pytest.raises(ArtefactError, match=r"dvc.lock says 60 at .*/steps, but params/esi.yaml says 61"):
        dossier.stage(load_params(PARAMS), PARAMS, "esi-v49")


@pytest.mark.long
def test_a_report_on_another_adapter_than_the_one_here_stops_it(committed):
    with staged(paths.adapter("esi-v49")) as out:
        fields = {"kind": "adapter", "name": "esi-v49", "task": "esi", "task_version": 1}
        seal(out, **fields, spec={"seed": 49}, inputs={})
    with pytest.raises(ArtefactError, match=r"data/adapters/esi-v49 is not what dvc\.lock records"):
        dossier.stage(committed, PARAMS, "esi-v49")
    Path("dvc.lock").unlink()
    with pytest.raises(ArtefactError, match=r"at /adapter_digest, but data/adapters/esi-v49 is"):
        dossier.stage(committed, PARAMS, "esi-v49")
    with staged(paths.adapter("esi-v49")) as out:
        seal(out, **fields, spec={"seed": 50}, inputs={})
    with pytest.raises(ArtefactError, match=r"says 49 at /versions/esi-v49/seed, .* says 50 at /spec/seed"):
        dossier.stage(committed, PARAMS, "esi-v49")


def exact() -> float:
    return json.loads(Path(THINK).read_text())["metrics"]["exact"]["value"]


@pytest.mark.long
def test_an_altered_page_or_record_or_an_older_file_stops_the_check(committed):
    dossier.stage(committed, PARAMS, "esi-v49")
    folder = paths.dossier("esi-v49")
    held = (folder / "README.md").read_text()
    shown = f"{exact():.4f}"
    (folder / "README.md").write_text(held.replace(f"{shown} [", "0.9938 ["))
    with pytest.raises(ArtefactError, match=rf"README.md, line 18, is .*0.9938.* say .*{shown}"):
        dossier.stage(committed, PARAMS, "esi-v49", check=True)
    (folder / "README.md").write_text(held)
    Path("bom.cdx.json").write_text(Path("bom.cdx.json").read_text() + "\n")
    with pytest.raises(ArtefactError, match=r"bom.cdx.json is another file than the dossier was written from"):
        dossier.stage(committed, PARAMS, "esi-v49", check=True)
    (folder / dossier.NUMBERS).write_text("{}")
    with pytest.raises(ArtefactError, match="is no record of a dossier"):
        dossier.stage(committed, PARAMS, "esi-v49", check=True)
    (folder / dossier.NUMBERS).unlink()
    with pytest.raises(ArtefactError, match="so there is no dossier to check"):
        dossier.stage(committed, PARAMS, "esi-v49", check=True)


@pytest.mark.long
@pytest.mark.parametrize(
    "value", [None, 5, "text", [], {}, [[]], {"exact": {"value": "x", "low": 0, "high": 0, "n": 1}}]
)
def test_a_malformed_report_is_shown_as_it_is_or_refused(committed, value):
    Path("dvc.lock").unlink()
    for mode in ("think", "direct"):
        for key in ("metrics", "slices", "rows", "paired", "unreadable", "note"):
            edit(paths.report("esi-v49") / f"{mode}.json", key, value=value)
    with suppress(ArtefactError):
        dossier.stage(committed, PARAMS, "esi-v49")
        assert set(pages("esi-v49")) == FILES


def test_a_file_that_is_no_json_is_refused(committed):
    Path(THINK).write_text("{")
    with pytest.raises(ArtefactError, match=f"{THINK} is not what its name says"):
        dossier.stage(committed, PARAMS, "esi-v49")


@pytest.mark.long
def test_the_command_says_what_differs_and_exits_with_1(committed, capsys):
    value = exact()
    assert cli.main(["dossier", "esi-v49", "--out", "papers"]) == 1  # git has no adapters
    assert "data/adapters/esi-v49/manifest.json, as dvc.lock records it, is not here" in capsys.readouterr().err
    assert {path.name for path in Path("papers").iterdir()} == FILES
    edit(THINK, "metrics", "exact", "value", value=0.5)
    assert cli.main(["dossier", "esi-v49", "--out", "papers", "--check"]) == 1
    assert f"has {value} at /metrics/exact/value, but it has 0.5" in capsys.readouterr().err
    assert cli.main(["dossier", "esi-v49-full"]) == 2
    assert "is no version that `clinrl dossier` knows" in capsys.readouterr().err


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


HOSTILE = "<script>alert(1)</script> ![x](http://e/x.png) [y](javascript:z) <http://e> [S1] | ` \\| <b"


def test_hostile_names_are_text_in_the_page(project):
    """In the reason of a version, in a metric and in the name of a row."""
    for mode in project.modes:
        file = paths.report("v1") / f"{mode}.json"
        content = json.loads(file.read_text())
        content["metrics"][HOSTILE] = content["metrics"]["exact"]
        content["rows"][-1]["name"] = HOSTILE
        content["slices"] = {HOSTILE: {HOSTILE: {"exact": content["metrics"]["exact"]}}}
        write_json(file, content)
    Path("dvc.lock").unlink()
    dossier.stage(project, PARAMS, "v1")
    written = pages("v1")
    tags = Tags()
    tags.feed(written[dossier.HTML])
    assert {tag for tag, _ in tags.found} & {"script", "img", "b", "iframe"} == set()
    links = {attributes["href"] for tag, attributes in tags.found if tag == "a"}
    ids = [attributes["id"] for _, attributes in tags.found if "id" in attributes]
    assert {link.removeprefix("#") for link in links} <= set(ids), "every link leads into the page"
    assert len(ids) == len(set(ids))
    assert "src=" not in written[dossier.HTML]
    assert "&lt;script&gt;alert(1)&lt;/script&gt; ![x](http://e/x.png) [y](javascript:z)" in written[dossier.HTML]
    for name in dossier.PAPERS:
        rows = [line for line in written[f"{name}.md"].splitlines() if "alert(1)" in line]
        assert not any("<script" in line.replace(r"\<", "") for line in rows)
    (row,) = [line for line in written["README.md"].splitlines() if "alert(1)" in line]
    assert len(re.findall(r"(?<!\\)\|", row)) == 4, "a name ends no cell"


def test_links_lead_into_the_page_alone():
    text = page(
        {"a": "[b](b.md) [c](https://c) ![d](d.png) <e@f.g>", "b": "<i>x</i>"}, title="", headings={}, sources={}
    )
    assert '<a href="#b">b</a> [c](https://c) ![d](d.png) &lt;e@f.g&gt;' in text
    assert "&lt;i&gt;x&lt;/i&gt;" in text
