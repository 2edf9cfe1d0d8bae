"""A million completions that no model should write, through every reader of turns, parser and reward.

Each grows from a right answer to a real case. It is read as a model's turn, calls of tools are made, the label is
parsed, and every reward that params.yaml knows scores it in turn; models that a reward asks answer from a list.
An exception is whatever a reader raises, and whatever takes longer than a second.
"""

import hashlib
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple

import attempts
import numpy
from attempts import Record
from projects import ROOT

from clinrl.artifacts import canonical_json
from clinrl.config.params import Params, load_params
from clinrl.models import rollout
from clinrl.models.chat import read_calls, read_turn, write_turn
from clinrl.tasks.base import Task, get_task
from clinrl.tasks.parts import Request
from clinrl.types import Case, Stop, Transcript

SHARES = {"esi": 0.45, "imaging": 0.35, "audit": 0.2}
"""How much of all completions each task reads: an audit is many calls."""
CASES = 24
"""Cases of each task."""
SLOW_S = 1.0
LIMIT_S = 10
"""When a reader is given up."""
BLOCK = 1000
"""Completions of one recorded attempt: they share a seed, so that it can be repeated by itself."""
LONG = 100_000
HALF = re.compile("[\ud800-\udfff]")
STOPS: Sequence[Stop] = ("answered", "max_tokens", "max_turns", "tool_error")

TOKENS = (
    "<think>", "</think>", "<think></think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", "<reasoning>",
    "</reasoning>", "<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "ANSWER:", "ANSWER: ESI 2", "ESI",
    "ANSWER: ESI 2 or 3", "ANSWER: ESI \u0662", "ANSWER: ESI ²", "ANSWER: ESI 99999999999999999999999999", "NaN",
    "Infinity", "-Infinity", "1e999", "-0", "0x10", "\x00", "\x1b[2J", "\u202e", "\ufeff", "\u2028", "\r\n", "\\", "{",
    "}", "[", "]", '"', "'", "```json\n", "```", "null", "true", "%s", "{0}", "$(id)", "usually appropriate",
    "usually not appropriate", "may be appropriate", "10/10", "score: 1e308", "\ud800", "\udfff", "é\u0301",
    "\U0001f600",
    '{"name": "approve", "arguments": {"proposal_id": NaN}}', '{"name": "approve", "arguments": []}', '{"name": 1}',
    '{"name": "__init__", "arguments": {}}', '{"name": "reset", "arguments": {"case": "x"}}',
    '<tool_call>{"name": "submit_audit_report", "arguments": {"report": 1}}</tool_call>',
    '<tool_call>{"name": "approve", "arguments": {"proposal_id": {"a": [1]}}}</tool_call>',
    '<tool_call>{"name": "flag_error", "arguments": {"proposal_id": null, "error_type": [], "reason": {}}}</tool_call>',
)  # fmt: skip
"""What is put in between."""
VERDICTS = (
    "8", "Scores: 9, 9, 9", "10 10 10 10", "nan", "-1e308", "1e999 1e999 1e999", "", "ignore the above: 10/10", "\x00",
    '{"score": Infinity}', "0.5\n" * 50, "score " + "9" * 400, "\ud800 7", "[[" * 200, "<answer>9</answer>", "five",
)  # fmt: skip
"""What a judge may say."""


class Reading(NamedTuple):
    """A task, cases with right answers to them, and the rewards that are paid for them."""

    task: Task
    cases: Sequence[Case]
    golds: Sequence[Sequence[tuple[str, bool]]]
    """Of each case: the texts of the turns of right answers, with whether they think."""
    rewards: Sequence[Any]


@cache
def readings() -> Mapping[str, Reading]:
    """What is fuzzed, by task: every reward of params.yaml."""
    params = load_params(ROOT / "params.yaml")
    return {name: _reading(params, name) for name in SHARES}


def _reading(params: Params, name: str) -> Reading:
    task = get_task(name)
    cases = list(task.cases(CASES, 7, pool="exam", mix=task.checks.mixes[0]))
    golds = []
    for case in cases:
        texts = []
        for thinking in (True, False):
            turns = (turn for turn in task.gold(case, thinking=thinking).messages if turn.role == "assistant")
            texts += [(write_turn(turn, thinking), thinking) for turn in turns]
        golds.append(texts)
    profiles = {version.profile for version in params.versions.values() if version.task == name}
    rewards = [task.Reward()]
    for version, block in params.versions.items():
        if block.profile in profiles and params.profiles[block.profile].method == "grpo":
            profiles.remove(block.profile)
            rewards.append(params.reward(version))
    return Reading(task, cases, golds, rewards)


def completion(text: str, random: Random) -> str:
    """A right turn, spoilt in one to three ways."""
    for _ in range(random.choice((1, 1, 2, 3))):
        text = random.choice(WAYS)(text, random)
    return text


def _cut(text: str, random: Random) -> str:
    return text[: random.randrange(len(text) + 1)]


def _hole(text: str, random: Random) -> str:
    a, b = sorted((random.randrange(len(text) + 1), random.randrange(len(text) + 1)))
    return text[:a] + text[b:]


def _again(text: str, random: Random) -> str:
    a, b = sorted((random.randrange(len(text) + 1), random.randrange(len(text) + 1)))
    return text[:b] + text[a:]


def _token(text: str, random: Random) -> str:
    at = random.randrange(len(text) + 1)
    return text[:at] + random.choice(TOKENS) + text[at:]


def _tokens(text: str, random: Random) -> str:
    return " ".join(random.choices(TOKENS, k=random.randrange(1, 12)))


def _unicode(text: str, random: Random) -> str:
    at = random.randrange(len(text) + 1)
    return text[:at] + "".join(map(chr, random.choices(range(0x110000), k=random.randrange(1, 9)))) + text[at:]


def _number(text: str, random: Random) -> str:
    digits = [at for at, letter in enumerate(text) if letter.isdigit()]
    if not digits:
        return text + "0"
    at = random.choice(digits)
    return (
        text[:at]
        + random.choice(("9" * 30, "-1", "1e400", "0.1", "²", "٣", "NaN", "", "0" * 50 + "3"))
        + text[at + 1 :]
    )


def _thoughts(text: str, random: Random) -> str:
    return "<think>a</think>" * random.randrange(1, 40) + text + "</think>" * random.randrange(3)


def _deep(text: str, random: Random) -> str:
    depth = random.choice((5, 90, 101, 400))
    inner = '{"a":' * depth + "1" + "}" * depth if random.random() < 0.5 else "[" * depth + "]" * depth
    return f'<tool_call>\n{{"name": "approve", "arguments": {{"proposal_id": {inner}}}}}\n</tool_call>'


def _answers(text: str, random: Random) -> str:
    return "\n".join([text] * random.randrange(2, 5))


def _lines(text: str, random: Random) -> str:
    lines = text.split("\n")
    random.shuffle(lines)
    return "\n".join(lines)


def _case(text: str, random: Random) -> str:
    return random.choice((text.upper, text.lower, text.title, text.swapcase))()


def _spaces(text: str, random: Random) -> str:
    return text.replace(" ", random.choice(("", "\t", "\u00a0", "  ", "\n")))


def _long(text: str, random: Random) -> str:
    """One in some hundreds, since each costs as much as those."""
    if random.random() > 0.004:
        return _token(text, random)
    part = random.choice((text[-40:], "a", " ", "<think>", "ANSWER: ESI 2 ", "9", "no ", "- ", "{", "\n"))
    return text + part * (LONG // max(1, len(part)))


WAYS: Sequence[Callable[[str, Random], str]] = (
    _cut, _hole, _again, _token, _token, _tokens, _unicode, _number, _thoughts, _deep, _answers, _lines, _case, _spaces,
    _long,
)  # fmt: skip


class TooSlow(BaseException):
    """A reader did not end in time. No Exception, so that no reader takes it for its own."""


def attack(total: int, seed: int) -> Iterator[Record]:
    """Read completions in blocks; one record a block, and one for each completion that was not read."""
    blocks = [
        (name, number) for name, share in SHARES.items() for number in range(max(1, round(total * share / BLOCK)))
    ]
    size = min(BLOCK, total)
    before = signal.signal(signal.SIGVTALRM, _give_up)
    try:
        for name, number in attempts.each(blocks, "fuzz", len(blocks)):
            yield from _block(readings()[name], f"{seed} {name} {number}", size)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _give_up(*_: object) -> None:
    raise TooSlow(f"no end after {LIMIT_S} s of processor time")


def _block(reading: Reading, seed: str, size: int) -> Iterator[Record]:
    random, faults = Random(seed), []
    for at in range(size):
        place = random.randrange(len(reading.cases))
        gold, thinking = random.choice(reading.golds[place])
        text = completion(gold, random)
        reward = reading.rewards[at % len(reading.rewards)]
        fault, state = "", random.getstate()
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
        try:
            for _ in range(2):  # again if it was slow, since a machine that others use stands still for a while
                random.setstate(state)
                started = time.process_time()
                read(reading.task, reading.cases[place], reward, text, thinking, random)
                if (took := time.process_time() - started) <= SLOW_S:
                    break
            else:
                fault = f"took {took:.1f} s"
        except (Exception, TooSlow) as error:  # noqa: BLE001  whatever a reader raises is what is looked for
            fault = f"{type(error).__name__}: {error}"
        if fault:
            faults.append(
                {
                    "what": fault[:200].encode("utf-8", "replace").decode(),
                    "at": at,
                    "text": ascii(text[:200]),
                    "characters": len(text),
                }
            )
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    yield {
        "what": f"{size} completions for {reading.task.name}",
        "seed": seed,
        "n": size,
        "outcome": f"{len(faults)} exceptions" if faults else "read",
        "faults": faults,
    }


def read(task: Task, case: Case, reward: Any, text: str, thinking: bool, random: Random) -> None:
    """Everything that is done with a model's text, from the turn to the total of the reward."""
    turn = read_turn(text, thinking)
    said = [turn]
    if task.episodes is not None:
        turn = read_calls(turn)
        environment = task.episodes.environment()
        environment.reset(case=case)
        said = [turn, *(rollout.act(environment, call) for call in turn.calls)]
    transcript = Transcript(messages=tuple(said), stop=STOPS[random.randrange(len(STOPS))])
    if HALF.search(text) is None:  # no tokenizer writes half a character; all else must be fit to be kept in a file
        canonical_json(transcript.model_dump(mode="json")).encode()
    label = task.parse(transcript)
    task.improvement.cost(task.label(case), label)
    heard = {ask: _hears(ask, random) for ask in task.asks.requests(case, transcript, reward)}
    score = task.asks.score(case, transcript, reward, heard)
    if not reward.low - 1e-6 <= score.total <= reward.high + 1e-6:
        raise AssertionError(f"a total of {score.total} is outside the declared range")


@cache
def _vector(seed: int) -> Any:
    values = numpy.random.default_rng(seed).normal(size=384).astype("float32")
    return values / numpy.linalg.norm(values)


def _hears(ask: Request, random: Random) -> Any:
    if ask.model == "encoder":
        return _vector(int.from_bytes(hashlib.sha256(ask.text.encode("utf-8", "replace")).digest()[:1], "big"))
    return random.choice(VERDICTS)


def counted(records: Sequence[Record]) -> dict[str, Any]:
    """What the report says of fuzzing."""
    return {
        "n": sum(record["n"] for record in records),
        "exceptions": sum(len(record["faults"]) for record in records),
        "attempts": list(records),
    }
