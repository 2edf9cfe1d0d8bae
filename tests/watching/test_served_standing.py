"""Drift against an exam: cases like its own raise no alarm, other texts do, and what is drawn alike rarely does."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from scipy.stats import binomtest

import champions
import examined
from clinrl import paths
from clinrl.analysis import baselines
from clinrl.config.params import load_params
from clinrl.config.schema import Watch
from clinrl.data.dataset import drawn_again
from clinrl.errors import ArtefactError
from clinrl.registry import versions
from clinrl.tasks import importing
from clinrl.tasks.base import get_task
from clinrl.watching import counts, store
from clinrl.watching.counts import Counts
from clinrl.watching.sequential import evidence
from clinrl.watching.standing import drift, exposed, safety, standing

TASK = get_task("esi")
STRANGERS = (Path(__file__).parents[1] / "strangers.txt").read_text(encoding="utf-8").splitlines()


def texts(n: int, seed: int) -> tuple[list[Any], list[str]]:
    cases = list(TASK.cases(n, seed, pool="exam", mix="reporting"))
    return cases, [baselines.text(TASK, case) for case in cases]


@pytest.fixture(scope="module")
def exam() -> tuple[counts.Reader, Counts]:
    cases, shown = texts(400, 1001)
    reader = counts.learn(TASK, cases, shown)
    return reader, sum(map(reader.read, shown), Counts())


def days(reader: counts.Reader, shown: list[str], size: int = 50) -> Iterator[list[Counts]]:
    """The counts so far, at each look."""
    read = [reader.read(text) for text in shown]
    parts = [sum(read[start : start + size], Counts()) for start in range(0, len(read), size)]
    return (parts[:look] for look in range(1, len(parts) + 1))


def test_of_the_exam_no_word_is_kept_that_few_texts_have() -> None:
    cases, _ = texts(100, 1001)
    assert counts.learn(TASK, cases, [*["calm adult"] * 99, "smith"]).words == ("adult", "calm")


def test_an_edge_is_the_first_value_of_the_bucket_above_it() -> None:
    found = [counts._bucket(value, (1.0, 2.0)) for value in (None, 0.5, 1.0, 1.5, 2.0)]
    assert found == ["absent", "below 1", "from 1 below 2", "from 1 below 2", "from 2"]


@pytest.mark.long
def test_other_cases_of_the_kind_raise_no_alarm_at_any_look(exam: Any) -> None:
    reader, known = exam
    _, shown = texts(300, 2002)
    assert all(drift(so_far, known, Watch())[1] > 0.05 for so_far in days(reader, shown))


@pytest.mark.long
@pytest.mark.parametrize(
    ("feature", "changed"),
    [
        ("text", lambda text, i: STRANGERS[i % len(STRANGERS)] if i % 2 else text),
        ("hr", lambda text, _: re.sub(r"\d+", "", text)),
        ("length in words", lambda text, _: text[: len(text) // 3]),
        ("word is", lambda text, _: text + " is is is is is is"),
    ],
)
def test_what_was_changed_raises_the_alarm_and_is_among_its_findings(
    exam: Any, feature: str, changed: Callable[[str, int], str]
) -> None:
    reader, known = exam
    _, shown = texts(200, 2002)
    *_, whole = days(reader, [changed(text, number) for number, text in enumerate(shown)])
    rows, p = drift(whole, known, Watch())
    assert p <= 0.05
    assert next(row for row in rows if row.feature == feature).p <= 0.05


@pytest.mark.long
def test_what_is_drawn_as_the_exam_was_raises_an_alarm_in_at_most_alpha_of_all_lives() -> None:
    draw, settings, alarms, lives = numpy.random.default_rng(5), Watch(alpha=0.2, margin=1e-9), 0, 60
    shares = {"one": (0.5, 0.3, 0.2), "two": (0.05, 0.95)}

    def counted(n: int) -> Counts:
        drawn = {name: draw.multinomial(n, of) for name, of in shares.items()}
        return Counts({(name, str(i)): int(k) for name, ks in drawn.items() for i, k in enumerate(ks) if k})

    for _ in range(lives):
        known, lived = counted(200), [counted(60) for _ in range(6)]
        alarms += any(drift(lived[:look], known, settings)[1] <= settings.alpha for look in range(1, 7))
    assert alarms / lives <= settings.alpha
    shares["one"] = (0.2, 0.6, 0.2)
    assert drift([counted(60) for _ in range(6)], known, settings)[1] <= settings.alpha


@pytest.mark.long
def test_what_is_not_served_yet_is_tested_with_the_rest(exam: Any) -> None:
    """So that p does not fall because a feature joins the others."""
    reader, known = exam
    _, shown = texts(100, 2002)
    *_, whole = days(reader, [text + " is is is is is is" for text in shown])
    more = known + Counts({("answer, think", "1"): 100, ("answer, think", "2"): 300})
    assert drift(whole, more, Watch())[1] > drift(whole, known, Watch())[1]


def test_p_of_a_finding_pays_for_all_that_is_tested() -> None:
    """Four rows, a bucket and what is beside it twice, and the half of alpha that the exam's bounds take."""
    known, lived = Counts({("one", "a"): 100, ("one", "b"): 100}), Counts({("one", "a"): 55, ("one", "b"): 5})
    ((row,), _) = drift([lived], known, Watch())
    alone = math.exp(-evidence([[55]], [[60]], [row.limit])[0])
    assert row.p == pytest.approx(alone * 4 * 2, rel=0.1)
    bound = binomtest(100, 200).proportion_ci(1 - 2 * 0.05 / 2 / 4).high
    assert row.limit == pytest.approx(bound + Watch().margin, rel=1e-3)
    assert (row.bucket, row.exam, row.served, row.n) == ("not b", 0.5, 0.9167, 60)


def test_of_imported_cases_no_word_and_no_exact_value_is_kept() -> None:
    """No edge of a bucket is the value of one patient, such as the slowest pulse."""
    cases, _ = texts(40, 1)
    theirs = [case.model_copy(update={"group": f"exam{importing.MARK}p{i}"}) for i, case in enumerate(cases)]
    pulses = [41, *range(60, 99)]
    told = [f"{' '.join(['smith'] * (1234 + i))} HR {pulse}" for i, pulse in enumerate(pulses)]
    reader = counts.learn(TASK, theirs, told)
    assert (reader.words, reader.examined) == ((), None)
    assert set(reader.edges["length in words"]) <= {1200.0, 1300.0}
    assert reader.edges["hr"]
    for edge in reader.edges["hr"]:
        assert counts.FEWEST <= sum(pulse < edge for pulse in pulses) <= len(pulses) - counts.FEWEST
    one = [case.model_copy(update={"group": theirs[0].group}) for case in theirs]
    assert counts.learn(TASK, one, told).edges["hr"] == []
    few = counts.learn(TASK, theirs[:4], told[:4])
    assert few.edges["hr"] == []
    assert few.read(told[0])[("hr", "present")] == 1


def test_the_readings_of_a_note_are_its_vital_signs() -> None:
    stated, read = Counter[str](), Counter[str]()
    for case in TASK.cases(60, 3, pool="base", mix="natural"):
        patient, found = case.key.presentation, TASK.reporting.readings(case.facts.narrative)
        truth = {"hr": patient.hr_bpm, "rr": patient.rr_bpm, "spo2": patient.spo2_pct, "bp": patient.sbp_mmhg,
                 "temp": patient.temp_c}  # fmt: skip
        for sign, value in truth.items():
            allowed = (value, patient.baseline_spo2_pct) if sign == "spo2" else (value,)
            assert sign not in found or found[sign] in allowed, case.facts.narrative
            stated[sign] += value is not None
            read[sign] += sign in found
    assert all(read[sign] > 0.9 * stated[sign] > 20 for sign in ("hr", "rr", "spo2", "bp", "temp"))
    assert TASK.reporting.readings("No vital signs, room 12.") == {}


def labelled(**pairs: int) -> list[Counts]:
    return [Counts({("labelled, think", name.replace("_", " ")[1:]): n for name, n in pairs.items()})]


@pytest.mark.parametrize(
    ("pairs", "alarm"),
    [
        ({"_1_as_3": 20, "_2_as_2": 10}, True),  # a third of all patients may be critical and under-triaged
        ({"_1_as_3": 6, "_2_as_2": 24}, False),
        ({"_1_as_unreadable": 20}, True),
        ({"_4_as_5": 200, "_5_as_3": 100}, False),  # no critical patient
    ],
)
def test_the_safety_metric_is_held_against_the_limit_of_the_gate(pairs: dict[str, int], alarm: bool) -> None:
    found, p = safety(examined.params(), TASK, labelled(**pairs), Watch())
    assert (p <= 0.05) == alarm
    assert all((row.feature, row.limit) == ("critical_under", 0.35) for row in found)
    assert all((row.low > row.limit) == alarm for row in found)


def test_cases_that_a_safety_metric_is_not_about_do_not_dilute_it() -> None:
    task = copy(TASK)
    task.safety = replace(TASK.safety, metric="high_risk_sensitivity")
    ((row,), p) = safety(examined.params(), task, labelled(_1_as_3=20, _2_as_2=10, _4_as_4=300), Watch(limit=0.35))
    assert (row.bucket, row.n) == ("no", 30)
    assert p <= 0.05


def test_a_limit_of_the_watch_counts_instead_of_the_gate_s() -> None:
    ((row,), p) = safety(examined.params(), TASK, labelled(_1_as_3=20, _2_as_2=10), Watch(limit=0.9))
    assert (row.limit, p) == (0.9, 1.0)


@pytest.mark.parametrize(
    ("pairs", "share"),
    [({"_1_as_3": 2, "_2_as_2": 3, "_4_as_4": 15}, 0.25), ({"_3_as_1": 4}, 0.0), ({"_2_as_unreadable": 1}, 1.0)],
)
def test_labels_say_how_many_patients_could_be_harmed(pairs: dict[str, int], share: float) -> None:
    assert exposed(TASK, labelled(**pairs)[0]) == share


def test_a_department_with_few_critical_patients_hides_what_the_gate_refuses() -> None:
    params = load_params()
    gate = params.gates["esi"].limits["critical_under"].max
    exam = [TASK.label(case) for case in drawn_again(params, "esi-x3", TASK)]
    critical = sum(label <= 2 for label in exam) / len(exam)
    assert gate
    assert 0.2 * critical > 0.13 > gate["embedded"]  # whoever misses a fifth of the critical patients

    def alarm(limit: float | None) -> bool:
        missed = labelled(_2_as_3=80, _2_as_2=320, _3_as_3=1600)  # a fifth of the labels are of such patients
        return safety(params, TASK, missed, Watch(limit=limit))[1] <= 0.05

    assert not alarm(None)
    assert alarm(gate["embedded"] * 0.2 / critical)


def test_without_a_label_or_a_gate_there_is_no_safety_alarm() -> None:
    assert safety(examined.params(), TASK, [Counts()], Watch()) == ((), 1.0)
    without = examined.params().model_copy(update={"gates": {}})
    assert safety(without, TASK, labelled(_1_as_3=20), Watch()) == ((), 1.0)


@pytest.mark.long
def test_a_candidate_whose_exam_is_not_here_does_not_hide_the_drift_of_the_champion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined.copy(champions.built(), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    params, champion, candidate = champions.params(), versions.find("esi", "v1"), versions.find("esi", "v2")
    with pytest.raises(ArtefactError, match="is about another v1 than is registered"):
        counts.reference(params, "v1", candidate.digest)
    reader, known = counts.reference(params, "v1", champion.digest, [counts.shadow("v1", champion.digest)])
    assert {bucket for feature, bucket in known if counts.SHADOW in feature} == {counts.SAME}
    answered = Counts({key: n for key, n in known.items() if key[0] == "answer, direct"})
    assert {bucket for _, bucket in answered} == {"1", "2", "3", "4", "5", "unreadable"}
    assert 0 in answered.values()
    lost = Counts({key: 100 * n for key, n in answered.items()})
    lost["answer, direct", next(bucket for (_, bucket), n in answered.items() if not n)] = 100 * answered.total()
    assert drift([lost], answered, Watch())[1] < 0.05  # a bucket that the exam left empty
    for name, edges in reader.edges.items():
        assert (name, f"below {edges[0]:g}") in known
    examined_ = counts._examined
    run, record = examined_(params, "v2")
    strangers = [(champion.digest, record), (candidate.digest, record.model_copy(update={"exam_digest": "f" * 64}))]
    for digest, other in strangers:  # another adapter's answers by now, or answers to another exam
        with monkeypatch.context() as patch:
            found = lambda given, name, other=other: (run, other) if name == "v2" else examined_(given, name)  # noqa: E731
            patch.setattr(counts, "_examined", found)
            _, beside = counts.reference(params, "v1", champion.digest, [counts.shadow("v2", digest)])
        assert not [feature for feature, _ in beside if counts.SHADOW in feature]
    asked = {(counts.shadow("v2", candidate.digest) + "direct", counts.SAME): 20}
    key = counts.key(champion.digest, reader.exam)
    store.add("esi", key, sum(map(reader.read, STRANGERS * 10), Counts(asked)), {}, 90)
    with_both = standing(params, champion)
    paths.exam_record("esi", "v2").unlink()
    found = standing(params, champion)
    assert (found.alarms, found.unseen) == (("drift",), "")
    assert {row.feature for row in with_both.drift} - {row.feature for row in found.drift} == {
        counts.shadow("v2", candidate.digest) + "direct"
    }
    for p, alarms in ((0.05, ("drift",)), (0.0501, ())):
        with monkeypatch.context() as patch:
            patch.setattr("clinrl.watching.standing.drift", lambda *_, p=p: ((), p))
            assert standing(params, champion).alarms == alarms
    asked_before = counts.key(champion.digest, "f" * 64)  # by buckets that no exam has any more
    store.add("esi", asked_before, sum(map(reader.read, STRANGERS * 1000), Counts()), {}, 90)
    assert standing(params, champion) == found
    paths.exam_record("esi", "v1").unlink()
    assert "data/reports" in standing(params, champion).unseen
