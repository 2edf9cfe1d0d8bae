"""The served audit: its own client plays it against the real server.

OpenEnv takes seconds to import, so each test imports what it needs: only the process that runs them pays for it.
"""

import ast
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import pytest

import auditors
import clinrl
from audits import READERS
from clinrl.config.schema import Mode
from clinrl.exports import openenv_manifest
from clinrl.models.chat import write_turn
from clinrl.models.rollout import run
from clinrl.tasks.audit import TASK
from clinrl.tasks.audit.cases import LEVEL_NAMES, cases
from clinrl.tasks.audit.env import CLOSED, calls_for
from clinrl.tasks.audit.episodes import answered_calls, play_again, write
from clinrl.tasks.audit.policies import TRIVIAL, Turn
from clinrl.tasks.audit.prompt import prompt
from clinrl.tasks.audit.rewards import CORRECTED
from clinrl.types import Call, Message, Transcript, is_malformed
from oddities import served
from samplers import ScriptedSampler
from validators import check_episode

pytest.importorskip("openenv", reason="OpenEnv is an optional extra")

SRC = Path(clinrl.__file__).parent
FOLDER = SRC / "tasks/audit/served"
POLICIES = {**READERS, **TRIVIAL}
SEED = 41


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("served") / "log", sessions=4) as server:
        yield server.url


@pytest.fixture
def audit(address):
    from clinrl.tasks.audit.served.client import AuditClient

    with AuditClient(base_url=address).sync() as client:
        yield client


def asked(level, index=0):
    return {"seed": SEED, "level": level, "pool": "train", "index": index}


def transcript_of(name, case, seed=3):
    """What a policy does in process."""
    return write(case, [Turn("", turn) for turn in POLICIES[name](case, Random(seed))], thinking=False)


def draw_case(start):
    from clinrl.tasks import openenv

    return openenv.draw_case(TASK, start, start.level)


def actions(transcript):
    """A transcript as actions: its calls that were answered, its turns that could not be read, and the end."""
    from clinrl.tasks.audit.served.models import AuditAction

    for call, _ in answered_calls(transcript):
        yield AuditAction(tool=call.name, arguments=call.arguments)
    for message in transcript.messages:
        if message.role == "assistant" and is_malformed(message):
            yield AuditAction(tool="")
    yield AuditAction(tool=None)


def total(case, transcript):
    return TASK.score(case, transcript, CORRECTED).total


def over_the_wire(audit, transcript, **options):
    """What the server says to a transcript's calls, and what it pays for them."""

    texts, paid = [audit.reset(**options).observation.text], []
    for action in actions(transcript):
        found = audit.step(action)
        texts.append(found.observation.text)
        paid.append(found.reward)
        if found.done:
            break
    return texts, paid


def told(case, transcript):
    """The same in process; the end is answered with nothing."""
    opening = "\n\n".join(message.content for message in prompt(case.facts))
    return [opening, *(message.content for message in transcript.messages if message.role == "tool")]


@pytest.mark.long
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("policy", ["oracle", "reader", "mediocre", "coin", "coin_diligent", "tool_farming", "null"])
def test_texts_and_score_are_those_of_the_episode_in_process(audit, policy, level):
    for index, case in enumerate(cases(3, SEED, pool="train", mix=level)):
        transcript = transcript_of(policy, case)
        texts, paid = over_the_wire(audit, transcript, **asked(level, index))
        state = audit.state()
        submitted = play_again(case, transcript).submitted
        assert texts == [*told(case, transcript), *([] if submitted else [""])]
        assert paid[-1] == total(case, transcript)
        assert set(paid[:-1]) <= {0.0}
        assert (state.done, state.submitted) == (True, submitted)
        if policy in ("oracle", "reader"):
            assert paid[-1] == CORRECTED.high


@pytest.mark.long
def test_what_a_model_wrote_earns_the_same_through_the_rollout(audit):
    """Text to turns to calls, as an exam makes them, mistakes among them."""
    found = list(cases(4, SEED, pool="train", mix="natural"))
    spoiled = ['<tool_call>\n{"name": 3}\n</tool_call>', "", None, None]
    endless = [False, False, False, True]
    scripts = {}
    for case, last, again in zip(found, spoiled, endless, strict=True):
        turns = [message for message in transcript_of("mediocre", case).messages if message.role == "assistant"]
        said = [write_turn(turn, thinking=False) for turn in turns]
        if last is not None:
            said[-2:] = [
                write_turn(
                    _calls(("no_such_tool", {"no such tool": "A1"}), ("approve", {"proposal": "A1"})), thinking=False
                ),
                last,
            ]
        scripts[prompt(case.facts)[-1].content] = said[:-2] + [said[0]] * 40 if again else said

    def reply(messages):
        turn = sum(message.role == "assistant" for message in messages)
        return scripts[messages[1].content][turn]

    mode = Mode(thinking=False, temperature=0.0, max_new_tokens={"embedded": 9999, "full": 9999})
    transcripts = run(ScriptedSampler(reply), TASK, found, mode, 9999, 1)
    for index, (case, transcript) in enumerate(zip(found, transcripts, strict=True)):
        _, paid = over_the_wire(audit, transcript, **asked("natural", index))
        assert paid[-1] == total(case, transcript)
    assert play_again(found[0], transcripts[0]).malformed == 3
    assert [transcript.stop for transcript in transcripts] == ["answered", "answered", "answered", "max_turns"]


def _calls(*calls):
    return Message(role="assistant", content="", calls=tuple(Call(name=name, arguments=given) for name, given in calls))


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        ("no_such_tool", {}, "error: no such tool; there are review_proposal "),
        ("", {"proposal_id": "A1"}, "error: no such tool; "),
        ("reset", {"case": "{}"}, "error: no such tool; "),
        ("approve", {}, "error: approve takes proposal_id"),
        ("approve", {"proposal_id": "A1", "why": "so"}, "error: approve takes proposal_id"),
        ("approve", {"proposal_id": "A99"}, "error: no such proposal; "),
        ("approve", {"proposal_id": ["A1", {"deep": None}]}, "error: no such proposal; "),
        ("flag_error", {"proposal_id": "A1", "error_type": 1e308, "reason": None}, "error: no such error type; "),
        ("submit_audit_report", {"report": 7}, "error: the report must be a text"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_and_counted(audit, tool, arguments, text):
    from clinrl.tasks.audit.served.models import AuditAction, Start

    audit.reset(**asked("hard"))
    found = audit.step(AuditAction(tool=tool, arguments=arguments))
    assert found.observation.text.startswith(text)
    assert (found.reward, found.done) == (0.0, False)
    ended = audit.step(AuditAction(tool="submit_audit_report", arguments={"report": ""}))
    case = draw_case(Start(**asked("hard")))
    turn = _calls((tool, arguments), ("submit_audit_report", {"report": ""}))
    heard = [Message(role="tool", content=said) for said in (found.observation.text, "submitted")]
    assert ended.reward == total(case, Transcript(messages=(turn, *heard), stop="max_turns")) < 0


def test_an_episode_ends_at_the_limit_of_calls_and_stays_ended(audit):
    from clinrl.tasks.audit.served.models import AuditAction, Start

    case = draw_case(Start(**asked("easy")))
    limit = calls_for(len(case.facts.proposals))
    audit.reset(**asked("easy"))
    look = AuditAction(tool="cohort_analysis", arguments={"feature": "age"})
    found = [audit.step(look) for _ in range(limit)]
    assert [one.done for one in found] == [False] * (limit - 1) + [True]
    assert found[-1].reward < 0
    state = audit.state()
    assert (state.step_count, state.calls, state.calls_left) == (limit, limit, 0)
    after = audit.step(look)
    assert (after.observation.text, after.reward, after.done) == (CLOSED, 0.0, True)
    assert audit.state() == state


def test_an_episode_of_calls_that_cannot_be_made_ends_too(audit):
    from clinrl.tasks.audit.served.models import AuditAction, Start

    limit = calls_for(len(draw_case(Start(**asked("easy"))).facts.proposals))
    audit.reset(**asked("easy"))
    found = [audit.step(AuditAction(tool="", arguments={})).done for _ in range(limit + 1)]
    assert found == [False] * limit + [True]


def test_before_a_reset_nothing_can_be_done():
    from clinrl.tasks.audit.served.models import AuditAction, AuditState
    from clinrl.tasks.audit.served.server import AuditEnvironment

    environment = AuditEnvironment(TASK)
    assert environment.step(AuditAction(tool="approve", arguments={"proposal_id": "A1"})).text == CLOSED
    assert environment.state == AuditState()


def test_sessions_do_not_mix(address):
    """Two audits of different cases, call by call in turn, earn what each earns alone."""
    from clinrl.tasks.audit.served.client import AuditClient
    from clinrl.tasks.audit.served.models import Start

    options = asked("easy", 0), asked("hard", 1)
    found = [draw_case(Start(**one)) for one in options]
    transcripts = [transcript_of("mediocre", case) for case in found]
    with AuditClient(base_url=address).sync() as one, AuditClient(base_url=address).sync() as other:
        clients = one, other
        texts = [[client.reset(**given).observation.text] for client, given in zip(clients, options, strict=True)]
        left = [list(actions(transcript)) for transcript in transcripts]
        paid = [0.0, 0.0]
        while any(left):
            for place in (0, 1):
                if left[place] and not clients[place].state().done:
                    result = clients[place].step(left[place].pop(0))
                    texts[place].append(result.observation.text)
                    paid[place] += result.reward
                else:
                    left[place].clear()
    assert texts == [told(case, transcript) for case, transcript in zip(found, transcripts, strict=True)]
    assert paid == [total(case, transcript) for case, transcript in zip(found, transcripts, strict=True)]


def test_equal_resets_equal_cases_and_those_of_the_data_set(audit):
    from clinrl.tasks.audit.served.models import Start

    assert audit.reset(**asked("medium")).observation == audit.reset(**asked("medium")).observation
    assert audit.reset(**asked("medium", 1)).observation != audit.reset(**asked("medium")).observation
    assert audit.reset().observation != audit.reset().observation
    whole = list(islice(cases(3, 7, pool="exam", mix="reporting"), 3))
    assert [draw_case(Start(seed=7, level="reporting", pool="exam", index=index)) for index in range(3)] == whole


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"level": "extreme"}, "level"),
        ({"pool": "all"}, "pool"),
        ({"seed": -1}, "seed"),
        ({"index": 200}, "index"),
        ({"levle": "easy"}, "levle"),
        ({"case": "{}"}, "case"),
    ],
)
def test_a_reset_that_asks_for_what_does_not_exist_is_refused_and_changes_nothing(audit, options, named):
    from clinrl.tasks.audit.served.models import AuditAction

    audit.reset(**asked("easy"))
    before = audit.state()
    with pytest.raises(RuntimeError, match=rf"Server error: {named}: "):
        audit.reset(**options)
    assert audit.state() == before
    assert audit.step(AuditAction(tool="cohort_analysis", arguments={"feature": "sex"})).observation.text


def test_neither_observations_nor_states_hold_anything_of_the_key():
    """A case with another key reads the same to the last character until it is scored."""
    from clinrl.tasks.audit.served.models import AuditObservation, AuditState, Start
    from clinrl.tasks.audit.served.server import AuditEnvironment

    assert set(AuditObservation.model_fields) == {"text", "done", "reward", "metadata"}
    assert set(AuditState.model_fields) == {
        "episode_id", "step_count", "level", "pool", "proposals", "calls", "calls_left", "malformed", "submitted",
        "done",
    }  # fmt: skip
    options = asked("hard") | {"episode_id": "one"}
    case = draw_case(Start(**asked("hard")))
    environment = AuditEnvironment(TASK)
    said = [environment.reset(**options).model_dump_json(), environment.state.model_dump_json()]
    for action in actions(transcript_of("reader", case)):
        found = environment.step(action)
        if found.done:
            break
        said += [found.model_dump_json(), environment.state.model_dump_json()]
    assert environment.state.done
    assert not any(case.id in text or f'"seed":{SEED}' in text for text in said)
    other = AuditEnvironment(TASK)
    other.reset(**options)
    other._case = case.model_copy(update={"key": case.key.model_copy(update={"pool_errors": 9, "truths": ()})})
    again = [said[0], other.state.model_dump_json()]
    for action in islice(actions(transcript_of("reader", case)), (len(said) - 2) // 2):
        again += [other.step(action).model_dump_json(), other.state.model_dump_json()]
    assert again == said


@pytest.mark.long
@pytest.mark.parametrize(
    "policy", ["coin", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reader", "null"))]
)
def test_the_validators_graders_pass_what_the_server_says(address, policy, tmp_path):
    from clinrl.tasks.audit.served.models import Start

    openenv_manifest.stage(auditors.params(), "audit", out=tmp_path)
    played = actions(transcript_of(policy, draw_case(Start(**asked("hard")))))
    check_episode(address, tmp_path / "openenv_audit", asked("hard"), [action.model_dump() for action in played])


def test_openenv_is_imported_by_two_places_alone():
    def imported(path):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "openenv" in text else ():  # to parse all takes a second
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module or ""

    users = {path for path in SRC.rglob("*.py") if any(name.partition(".")[0] == "openenv" for name in imported(path))}
    assert users
    assert {path for path in users if path.parent != FOLDER} == {SRC / "tasks/openenv.py"}
