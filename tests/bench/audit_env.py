"""What the audit environment costs: tool calls and episodes a second on one core, and the memory of many at once."""

import json
import resource
import sys
import time
from pathlib import Path
from random import Random

from clinrl.runtime import determinism
from clinrl.tasks.audit.cases import cases
from clinrl.tasks.audit.env import AuditEnv
from clinrl.tasks.audit.rewards import CORRECTED, score

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from audits import oracle, play, was_submitted

EPISODES = 1000
REPEATS = 5


def peak_mb() -> float:
    """The greatest resident memory so far, MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)


def main() -> None:
    """Print the rows."""
    start = time.perf_counter()
    texts, calls, logs, drawn = [], [], [], list(cases(EPISODES, 9, pool="mine", mix="hard"))
    drawing = time.perf_counter() - start
    for case in drawn:
        turns = oracle(case, Random(0))
        texts.append(case.model_dump_json())
        calls.append([action for turn in turns for action in turn])
        logs.append(play(case, turns))
    before = peak_mb()
    start = time.perf_counter()
    envs = [AuditEnv() for _ in drawn]
    for env, text in zip(envs, texts, strict=True):
        env.reset(text)
    resetting = time.perf_counter() - start
    speeds = []
    for repeat in range(REPEATS):
        if repeat:
            for env, text in zip(envs, texts, strict=True):
                env.reset(text)
        start = time.perf_counter()
        for env, actions in zip(envs, calls, strict=True):
            for tool, arguments in actions:
                getattr(env, tool)(**arguments)
        speeds.append(sum(map(len, calls)) / (time.perf_counter() - start))
    grown = peak_mb() - before
    start = time.perf_counter()
    for case, log in zip(drawn, logs, strict=True):
        assert score(case, log, submitted=was_submitted(log), malformed=0, reward=CORRECTED).total == 1.0
    scoring = time.perf_counter() - start
    rows = [
        ("audit cases drawn", round(EPISODES / drawing), "1/s", "hard"),
        ("audit environments reset", round(EPISODES / resetting), "1/s", "from JSON"),
        ("audit tool calls", round(sorted(speeds)[REPEATS // 2]), "1/s", f"perfect play, median of {REPEATS}"),
        ("audits scored", round(EPISODES / scoring), "1/s", "corrected"),
        (f"{EPISODES} audit environments, played", round(grown, 1), "MB", "growth of peak memory"),
    ]  # fmt: skip
    print(json.dumps(rows))


if __name__ == "__main__":
    determinism.pin()
    main()
