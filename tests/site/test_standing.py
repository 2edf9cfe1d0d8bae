"""How a version stands at its gate, from reports alone; tests of the site have what the audit log says."""

import pytest

from clinrl.config.params import load_params
from clinrl.site.standing import History, Standing, standing
from clinrl.site.versions import examined


def stands(name: str) -> Standing:
    params, exam = load_params(), examined(load_params(), name)
    return standing(params, params.model(name), exam.reports, exam.agreement, History([]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "state", "says"),
    [
        ("esi-base", "base", "all versions start"),
        ("esi-v45c", "waived", "Never released: Kept to show"),
        ("esi-v49", "refused", "No decision was made. Its exam breaks the gate: critical_under (think) is 0.05875"),
        ("esi-v49-2", "open", "`clinrl decide esi-v49-2`"),
    ],
)
def test_reports_tell_how_a_version_stands(name: str, state: str, says: str) -> None:
    found = stands(name)
    assert found.state == state
    assert says in found.says


def test_without_a_log_that_can_be_believed_nothing_is_said_of_decisions() -> None:
    params, exam = load_params(), examined(load_params(), "esi-v49-2")
    history = History([], "line 3 was altered")
    found = standing(params, params.model("esi-v49-2"), exam.reports, exam.agreement, history)
    assert (found.state, found.says) == ("unknown", "What was decided is unknown: line 3 was altered.")


def test_each_absolute_limit_is_held_against_each_mode() -> None:
    found = {(finding.metric, finding.mode) for finding in stands("esi-v49").findings}
    assert found == {
        *((metric, mode) for metric in ("critical_under", "no_parse") for mode in ("think", "direct")),
        ("mode_agreement", "all modes"),
    }
