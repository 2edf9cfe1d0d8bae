"""What a reward that asks models costs: 64 completions scored, with an encoder and with a judge, cold and cached.

The completions are gold reasonings in other words and reasonings of other cases, so that nearly every sentence is new
to a cold encoder. The share of a GRPO step is read from the timings of the arms that were trained here.
"""

import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from clinrl import paths
from clinrl.models import judges
from clinrl.runtime import determinism
from clinrl.tasks.base import get_task
from clinrl.tasks.imaging import judging
from clinrl.tasks.imaging.cases import cases
from clinrl.types import Message, Transcript

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import CORRECTED

N = 64
REPEATS = 5


def main() -> None:
    """Print the rows."""
    task = get_task("imaging")
    rng = Random(1)
    drawn = list(cases(N, 4, pool="mine", mix="balanced"))
    pairs = []
    for case in drawn:
        said = " ".join(judging.reword(sentence, rng) for sentence in rng.choice([case, drawn[0]]).key.reasoning)
        turn = Message(role="assistant", content=f"<answer>{case.key.label}</answer>", thinking=said)
        pairs.append((case, Transcript(messages=(turn,), stop="answered")))
    rows: list[tuple[Any, ...]] = []
    for arm, model in (("custom-embedding", "encoder"), ("llm-eval", "judge")):
        reward = CORRECTED[arm]
        asked = judges.Judges(paths.base("imaging"))
        first = drawn[0], task.gold(drawn[0], thinking=True)
        judges.scores(task, [first], reward, asked)  # loads the model
        start = time.perf_counter()
        judges.scores(task, pairs, reward, asked)
        cold = time.perf_counter() - start
        cached = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            judges.scores(task, pairs, reward, asked)
            cached.append(time.perf_counter() - start)
        middle = round(sorted(cached)[REPEATS // 2], 4)
        distinct = len({ask for pair in pairs for ask in task.asks.requests(*pair, reward)})
        rows += [
            (f"reward of {N} completions, {model} asked anew", round(cold, 3), "s", f"{distinct} distinct asks"),
            (f"reward of {N} completions, {model} cached", middle, "s", f"median of {REPEATS}"),
        ]
    print(json.dumps(rows))


if __name__ == "__main__":
    determinism.pin()
    main()
