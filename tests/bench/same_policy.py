"""Whether the shared paths of loss and generation train models as good as TRL's: the same recipes and seeds, by both.

Each seed trains the whole lineage twice, as `clinrl replicate` does and where it does, so what is there already is not
trained again. A row holds the difference of exact answers on the exam, paired by its cases, over all seeds.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from clinrl.analysis.paired import Answers
from clinrl.config.files import merge_files, read_files
from clinrl.config.params import load_params
from clinrl.intervals import average_difference, runs_of_means
from clinrl.pipeline import replicate
from clinrl.runtime import determinism

MEASURED = "esi-v49"
SEEDS = 3


def sharing(source: Path, lineage: Sequence[str]) -> dict[str, Any]:
    """All parameters, with both paths shared wherever a recipe of the lineage follows a reward."""
    tree, _ = merge_files(read_files(source))
    for version in lineage:
        recipe = tree["profiles"][tree["versions"][version]["profile"]]
        if recipe["method"] == "grpo":
            recipe["trainer"]["embedded"] |= {"loss_path": "shared", "generation_path": "shared"}
    return tree


def hits(found: Answers) -> list[float]:
    """For each case, whether the answer is the gold label."""
    return [float(answer == gold) for answer, gold in zip(found.answers, found.golds, strict=True)]


def rows(stock: Sequence[dict[Any, Answers]], shared: Sequence[dict[Any, Answers]]) -> list[dict[str, Any]]:
    """A row for each version and mode, given the answers of each seed by either path."""
    found = []
    for name, mode in stock[0]:
        mine, theirs = (runs_of_means([hits(run[name, mode]) for run in runs]) for runs in (shared, stock))
        assert mine is not None
        assert theirs is not None
        change, p = average_difference(mine, theirs)
        seeds = ", ".join(f"{100 * a:.1f} and {100 * b:.1f}" for a, b in zip(mine.values, theirs.values, strict=True))
        found.append({
            "what": f"exact answers of {name}, {mode}, shared paths less TRL's", "value": round(100 * change.value, 2),
            "unit": "points",
            "note": f"{100 * change.low:.1f} to {100 * change.high:.1f}, p {p:.2g}; {change.n} cases; by seed {seeds}",
        })  # fmt: skip
    return found


def measured(version: str, seeds: int) -> list[dict[str, Any]]:
    """The rows of the report."""
    stock, shared, source = [], [], Path("params.yaml")
    params = load_params()
    lineage = params.lineage(version)
    rewarded = [name for name in lineage if params.profiles[params.versions[name].profile].method == "grpo"]
    other = Path(".clinrl/shared_paths/params.yaml")
    other.parent.mkdir(parents=True, exist_ok=True)
    YAML(typ="safe").dump(sharing(source, lineage), other)
    for k in range(seeds):
        for file, runs in ((source, stock), (other, shared)):
            own = file == source and k == 0
            with chdir(Path() if own else replicate.replicated(load_params(file), lineage, k, file)):
                runs.append(replicate.answers_of(load_params(), lineage))
    return [row for row in rows(stock, shared) if any(f" {name}," in row["what"] for name in rewarded)]


def main() -> None:
    """Print the rows."""
    print(json.dumps(measured(MEASURED, SEEDS)))


if __name__ == "__main__":
    determinism.pin()
    sys.exit(main())
