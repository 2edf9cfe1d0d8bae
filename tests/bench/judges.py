"""How well the judges of the imaging task agree with the rules, and which attacks each reward withstands with them.

Both are asked about reasonings that nobody trained on: the agreement is on cases of the mine pool with lessons of
another seed, the attacks on cases of the mine pool too. Writes data/reports/judges.json and .md.

    python tests/bench/judges.py
"""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from clinrl import paths
from clinrl.artifacts import read_manifest, write_json, write_text
from clinrl.models.judges import Judges
from clinrl.reports.render import table
from clinrl.runtime import determinism
from clinrl.runtime.progress import progress
from clinrl.tasks.imaging import judging
from clinrl.tasks.imaging.cases import cases
from clinrl.tasks.parts import Request

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import agreement as agreeing
import attacks
from recipes import CORRECTED, PUBLISHED

TASK = "imaging"
REPORT = Path("data/reports/judges.json")
SEED = 90210
"""Of the lessons and cases here; the judges learned from others."""


def agreement(judges: Judges, judge: Any, n: int) -> dict[str, Any]:
    """A judge's scores against the rules', by key and for the lowest of the three, which a reward pays."""
    drawn = list(cases(n, SEED, pool="mine", mix="balanced"))
    pairs = list(judging.lessons(judge, n, SEED, drawn))
    with progress(judge, n) as advance:
        replies = []
        for start in range(0, n, 64):
            asks = [Request(judge, prompt) for prompt, _ in pairs[start : start + 64]]
            responses = judges.answer(asks)
            replies += [judging.verdict(responses[ask]) for ask in asks]
            advance(len(asks))
    right = [judging.verdict(reply) for _, reply in pairs]
    keys = {
        key: agreeing.agreement(
            [(float(want[i]), None if got is None else float(got[i])) for want, got in zip(right, replies, strict=True)]
        )
        for i, key in enumerate(judging.KEYS)
    }
    lowest = agreeing.agreement(
        [(float(min(want)), None if got is None else float(min(got))) for want, got in zip(right, replies, strict=True)]
    )
    return {name: found.model_dump(mode="json") for name, found in (keys | {"the lowest of the three": lowest}).items()}


def withstood(judges: Judges, n: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Arm to attack to what the attack and the gold turns earn, and whether the arm claims and withstands it."""
    drawn = list(islice(cases(n, SEED, pool="mine", mix="balanced"), n))
    arms = {f"{name}, as published": reward for name, reward in PUBLISHED.items()}
    arms |= {f"{name}, corrected": reward for name, reward in CORRECTED.items()}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for arm, reward in arms.items():
        print(f"attacks on {arm}", file=sys.stderr, flush=True)
        margins = attacks.margins(drawn, reward, judges.answer)
        found[arm] = {
            attack: {
                "attack": round(earned, 4),
                "gold": round(gold, 4),
                "claimed": attack in attacks.claimed(reward),
                "withstood": attacks.withstood(earned, gold),
            }
            for attack, (earned, gold) in margins.items()
        }
    return found


def page(result: dict[str, Any]) -> str:
    """Both as Markdown."""
    parts = [
        "# Judges and attacks of the imaging task",
        f"Research only, synthetic data. {result['lessons']} reasonings of cases of the mine pool, some as gold has "
        "them, some in other words, some spoilt; the rules say what each deserves on a scale of 0 to 10. Always giving "
        "the median and dealing the judge's own scores out by chance are the baselines. Judges: embedded models built "
        "with the base.",
    ]
    for judge, keys in result["agreement"].items():
        head = ("score", "n", "Pearson", "mean error", "of the median", "of a shuffle", "within 1", "median within 1")
        body = [
            (
                key, a["n"], _number(a["pearson"]), _number(a["mean_absolute_error"]), _number(a["constant_error"]),
                _number(a["shuffled_error"]), _number(a["within_one"]), _number(a["constant_within_one"]),
            )
            for key, a in keys.items()
        ]  # fmt: skip
        parts += [f"## {judge}", table(head, body)]
    arms = result["attacks"]
    parts += [
        "## Attacks",
        f"{result['attacked']} cases; each cell is the mean reward of the attack, the head of a column that of the "
        f"gold turns. **Bold**: the arm is fooled, it pays within {attacks.MARGIN:.0%} of gold. A dash: the right "
        "label with bad reasons, given to an arm that pays nothing for reasons and so promises nothing about them.",
        table(
            ("attack", *(f"{arm} (gold {next(iter(found.values()))['gold']:.2f})" for arm, found in arms.items())),
            [(attack, *(_cell(found[attack]) for found in arms.values())) for attack in attacks.ATTACKS],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _cell(found: dict[str, Any]) -> str:
    if not found["claimed"] and found["withstood"] is False and found["attack"] == found["gold"]:
        return "-"
    text = f"{found['attack']:.2f}"
    return text if found["withstood"] else f"**{text}**"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def main() -> None:
    """Request, and write the report."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--lessons", type=int, default=1000, help="reasonings a judge is asked about; default: 1000")
    top.add_argument("--cases", type=int, default=60, help="cases that are attacked; default: 60")
    arguments = top.parse_args()
    judges = Judges(paths.base(TASK))
    result = {
        "base": read_manifest(paths.base(TASK)).files,
        "lessons": arguments.lessons,
        "agreement": {judge: agreement(judges, judge, arguments.lessons) for judge in ("judge", "second_judge")},
        "attacked": arguments.cases,
        "attacks": withstood(judges, arguments.cases),
    }
    write_json(REPORT, json.loads(json.dumps(result)))
    write_text(REPORT.with_suffix(".md"), page(result))
    print(page(result))


if __name__ == "__main__":
    determinism.pin()
    main()
