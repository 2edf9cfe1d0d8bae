"""The published protocol and the sampled exam, played by scripts whose numbers are known."""

import shutil
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace

import pytest

import auditors
from auditors import TASK, oracle
from clinrl import paths
from clinrl.artifacts import identity, read_manifest
from clinrl.benchmarks import protocol
from clinrl.benchmarks.protocol import ALL, EXAMINED, ORACLE, SAMPLED, ProtocolReport
from clinrl.cli import commands
from clinrl.config.params import Params
from clinrl.data.dataset import read_cases
from clinrl.errors import ArtefactError, DataError, ParamsError

LEVELS = ["easy", "medium", "hard"]
POLICIES = TASK.policies()
PLAYERS = {"audit-base": POLICIES["flag_all_diligent"], "v1": oracle, "v2": POLICIES["submit_only"]}


def cases():
    drawn = protocol.draw(TASK, auditors.SETTINGS["seeds"], LEVELS)
    return [*drawn.values(), *read_cases(paths.cases("x1"), TASK)]


def play(params: Params, name: str) -> None:
    with auditors.speaking(PLAYERS[name], cases()):
        protocol.stage(params, name)


def report(name: str) -> ProtocolReport:
    return ProtocolReport.model_validate_json(paths.protocol_report(name).read_bytes())


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The project with the reports of the base and of v1, which plays as the oracle does. Not to be written to."""
    folder = tmp_path_factory.mktemp("protocol")
    with chdir(folder):
        auditors.build(auditors.params(), PLAYERS)
        for name in ("audit-base", "v1"):
            play(auditors.params(), name)
    return folder


@pytest.fixture
def here(finished, monkeypatch) -> Path:
    monkeypatch.chdir(finished)
    return finished


@pytest.fixture
def own(finished, tmp_path, monkeypatch) -> Path:
    """A copy that may be changed."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
def test_the_oracle_reaches_everything(here):
    found = report("v1")
    assert [(cell.seed, cell.level) for cell in found.cells] == [
        (seed, level) for seed in (42, 137) for level in LEVELS
    ]
    for row in found.played:
        if row.who in ("v1", ORACLE):
            assert set(row.scores["ours"]) == {1.0}
            assert {name: (mean.value, mean.low, mean.n) for name, mean in row.means["ours"].items()} == {
                **dict.fromkeys(LEVELS, (1.0, 1.0, 2)), ALL: (1.0, 1.0, 6),
            }  # fmt: skip
            assert row.means["theirs"]["easy"].value == pytest.approx(0.7136)
            assert max(row.scores["theirs"]) < 0.72
    for row in found.sat:
        if row.who in ("v1", ORACLE):
            for level in row.levels.values():
                assert (level.quality.value, level.quality.low, level.quality.n) == (1.0, 1.0, 4)
                assert level.statistic.value == 1.0
                assert {recall.value for recall in level.recall.values()} == {1.0}


@pytest.mark.long
def test_everybody_is_there_in_every_mode_and_decoding(here):
    found = report("v1")
    idle = [*POLICIES, ORACLE]
    modes = ("think", "direct")
    assert [(row.who, row.mode) for row in found.played] == [
        *(("v1", mode) for mode in modes), *(("audit-base", mode) for mode in modes), *((name, "") for name in idle),
    ]  # fmt: skip
    assert {(row.who, row.mode, row.decoding) for row in found.sat} == {
        *((who, mode, how) for who in ("v1", "audit-base") for mode in modes for how in (SAMPLED, EXAMINED)),
        *((name, "", "") for name in idle),
    }
    assert report("audit-base").against is None


def test_counts_are_those_of_the_exam(here):
    exam = list(read_cases(paths.cases("x1"), TASK))
    found = report("v1").sat[0]
    for level in LEVELS:
        four = [case for case in exam if case.facts.level == level][:4]
        right = [truth.error or "approve" for case in four for truth in case.key.truths]
        assert {label: recall.n for label, recall in found.levels[level].recall.items()} == {
            label: right.count(label) for label in TASK.labels if label in right
        }


def test_a_row_is_the_same_whoever_plays_it(here):
    """The scripted base is one of the policies: the loop of turns and the policy itself earn the same."""
    found = report("audit-base")
    rows = {(row.who, row.mode, row.decoding): row for row in found.sat}
    for mode in ("think", "direct"):
        for how in (SAMPLED, EXAMINED):
            assert rows["audit-base", mode, how].levels == rows["flag_all_diligent", "", ""].levels
    scores = {row.who: row.scores for row in found.played}
    assert scores["audit-base"] == scores["flag_all_diligent"]


def test_above_is_whether_the_intervals_are_apart(here):
    found = report("v1")
    above = {(row.other, row.mode, row.decoding): row.levels for row in found.above}
    assert len(above) == len(found.above) == 4 * (len(POLICIES) + 1)
    assert above["submit_only", "think", SAMPLED] == dict.fromkeys(LEVELS, True)
    rivals = {(row.who, row.mode, row.decoding): row.levels for row in found.sat}
    for (other, mode, decoding), levels in above.items():
        theirs = rivals[(other, mode, decoding) if other == "audit-base" else (other, "", "")]
        assert levels == {level: theirs[level].quality.high < 1.0 for level in LEVELS}


def test_the_page_says_what_may_be_compared(here):
    text = paths.protocol_report("v1").with_suffix(".md").read_text()
    assert "The published figures are not comparable: " in text
    assert "| published base | 0.087 | 0.018 | 0.015 |  |" in text
    assert "| published, trained | 0.287 | 0.129 | 0.044 |  |" in text
    assert "| v1, think | 1.000, no interval |" in text
    assert "| submit_only | yes | yes | yes |" in text
    assert "With 6 episodes" in text
    assert "think greedy, direct greedy" in text


def test_one_that_decides_nothing_is_above_nobody_and_equal_runs_write_equal_bytes(own):
    written = []
    for _ in range(2):
        play(auditors.params(), "v2")
        path = paths.protocol_report("v2")
        written.append((path.read_bytes(), path.with_suffix(".md").read_bytes()))
    assert written[0] == written[1]
    assert not any(yes for row in report("v2").above for yes in row.levels.values())


def test_a_cell_is_the_first_case_of_its_level():
    drawn = protocol.draw(TASK, [42, 7], LEVELS)
    for (seed, level), case in drawn.items():
        some = TASK.cases(50, seed, pool="exam", mix="published")
        assert case == next(one for one in some if one.facts.level == level)
        assert TASK.pool_of(case.group) == "exam"


@pytest.mark.long
def test_a_level_that_no_seed_draws_is_refused():
    with pytest.raises(DataError, match="seed 42 draws no nowhere case of audit"):
        protocol.draw(TASK, [42], ["nowhere"])


def test_an_exam_that_is_too_small_is_refused(own):
    settings = auditors.SETTINGS | {"episodes": 99}
    params = auditors.params(protocols={"bases": {"audit-base": settings}, "versions": {}})
    with pytest.raises(ParamsError, match=r"the exam x1 has \d+ cases of level easy, and the protocol asks for 99"):
        protocol.stage(params, "audit-base")


def test_a_version_needs_the_report_of_whoever_it_is_compared_with(own):
    paths.protocol_report("audit-base").unlink()
    with pytest.raises(ArtefactError, match="run `clinrl protocol audit-base`"):
        protocol.stage(auditors.params(), "v1")


def test_a_report_of_other_episodes_is_refused(own):
    found = report("audit-base")
    changed = found.model_copy(update={"exam_digest": "0" * 64})
    paths.protocol_report("audit-base").write_text(changed.model_dump_json())
    with pytest.raises(ArtefactError, match=r"audit-base\.json has other exam digest than v1 would have"):
        protocol.stage(auditors.params(), "v1")


def test_a_report_by_another_sampler_is_refused(own, monkeypatch):
    found = report("audit-base")
    changed = found.model_copy(update={"sampler": {"name": "vllm", "version": "0.30.0"}})
    paths.protocol_report("audit-base").write_text(changed.model_dump_json())
    another = SimpleNamespace(identity={"name": "transformers", "version": "5.23.0"})
    monkeypatch.setattr(protocol, "open_sampler", lambda *_: another)
    with pytest.raises(ArtefactError, match=r"v1 and audit-base cannot be compared: transformers 5\.23\.0 wrote"):
        protocol.stage(auditors.params(), "v1")


def test_answers_of_another_adapter_are_refused(own):
    manifest = paths.adapter("v1") / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"spec": {}', '"spec": {"seed": 9}'))
    assert identity(read_manifest(paths.adapter("v1"))) != report("v1").adapter_digest
    with pytest.raises(ArtefactError, match="was answered by another adapter"):
        protocol.stage(auditors.params(), "v1")


def changed(kind, name, **fields):
    found = {part: dict(some) for part, some in auditors.PARAMS["protocols"].items()}
    found[kind][name] = found[kind].get(name, auditors.SETTINGS) | fields
    return found


@pytest.mark.parametrize(
    ("protocols", "says"),
    [
        (changed("bases", "esi-base"), "protocols.bases.esi-base: 'esi-base' is not the base of a task"),
        (changed("versions", "v9", against="v1"), "protocols.versions.v9: 'v9' is not a version"),
        (changed("versions", "v1", task="esi"), "protocols.versions.v1.task: 'esi' is not its task"),
        (changed("versions", "v1", exam="d1"), "protocols.versions.v1.exam: 'd1' is not the exam that it took"),
        (changed("versions", "v1", levels=["esay"]), "'esay' is not a level of audit; did you mean easy"),
        (changed("versions", "v1", against="v2"), "'v2' is not an ancestor or the base"),
        (changed("versions", "v1", episodes=5), "protocols.versions.v1.episodes is not that of audit-base"),
        (changed("bases", "audit-base", seeds=[1, 1]), "names 1, 1; each may be named once"),
    ],
)
def test_params_refuse_a_protocol_that_means_nothing(protocols, says):
    with pytest.raises((ParamsError, ValueError), match=says):
        auditors.params(protocols=protocols)


def test_a_protocol_needs_a_task_that_has_one(valid):
    settings = auditors.SETTINGS | {"task": "esi", "exam": "esi-x1"}
    with pytest.raises(ParamsError, match=r"'esi' is not a task with a published protocol; .*allowed: audit"):
        Params.model_validate(valid | {"protocols": {"bases": {"esi-base": settings}}})


def test_a_name_without_a_protocol_is_refused(here):
    with pytest.raises(ParamsError, match=r"params\.yaml has no protocol of 'v3'; .*allowed: audit-base, v1, v2"):
        protocol.stage(auditors.params(), "v3")
    assert commands.COMMANDS["protocol"].stage
