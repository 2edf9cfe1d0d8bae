"""How served requests are watched, and whose consent mining them needs."""

from typing import Any

import pytest
from pydantic import ValidationError

import champions
import dolls
import examined
from clinrl.config.schema import ImportSpec, Watch
from clinrl.errors import ParamsError

WARD = {"task": "esi", "task_version": 2, "source": "data/sources/ward"}


@pytest.mark.parametrize("use", ["train", "mine"])
def test_what_was_served_is_mined_with_the_consent_of_its_source_alone(use: str) -> None:
    with pytest.raises(ValidationError, match=f"is missing; records of a served version are {use} data only"):
        dolls.params(imports={"ward": WARD | {"use": use, "served": True}})
    assert dolls.params(imports={"ward": WARD | {"use": use, "served": True, "consent": True}}).imports["ward"].consent


def test_an_exam_of_what_was_served_and_records_of_old_need_none_and_stay_as_they_were_recorded() -> None:
    assert ImportSpec(**WARD, use="exam", served=True)
    assert "consent" not in ImportSpec(**WARD, use="train").model_dump()


@pytest.mark.parametrize(
    ("watches", "says"),
    [
        ({"imaging": {}}, "watches: 'imaging' is not a task with a gate"),
        ({"esi": {"cron": "now"}}, "watches.esi.cron is 'now'; it needs five fields"),
    ],
)
def test_a_watch_that_cannot_be_is_refused(watches: Any, says: str) -> None:
    with pytest.raises(ParamsError, match=says):
        champions.params(watches=watches)
    assert champions.params(watches={"esi": {}}).watches["esi"] == Watch()


def test_where_the_gate_allows_no_harm_nobody_approves_rollbacks_without_a_limit() -> None:
    """One label by mistake would be infinite evidence."""
    none = {"max": {"embedded": 0.0, "full": 0.0}, "may_rise": 0.0}
    gate = examined.GATES["esi"]
    gates = {"esi": {**gate, "limits": {**gate["limits"], "critical_under": none}}}
    for watch in ({}, {"approver": champions.ADA, "limit": 0.01}):
        assert champions.params(gates=gates, watches={"esi": watch})
    with pytest.raises(ParamsError, match=r"set watches\.esi\.limit to a share above 0"):
        champions.params(gates=gates, watches={"esi": {"approver": champions.ADA}})
