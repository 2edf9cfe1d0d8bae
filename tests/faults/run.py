"""Attacks the pipeline and says what came of it: a table of attempts and outcomes, and data/reports/faults.json.

Kills commands at random moments, alters files by hand, feeds parsers and rewards what no model should write, hands in
hostile files and requests, and gives one command many times at once. Everything happens in small projects of its own;
nothing of the checkout is touched. The same seed attacks the same places.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for folder in (ROOT, ROOT / "tests/flows", ROOT / "tests", HERE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from clinrl.artifacts import write_json  # noqa: E402
from clinrl.runtime import determinism  # noqa: E402

REPORT = ROOT / "data/reports/faults.json"
SEED = 20260101
EPILOG = """examples:
  python tests/faults/run.py
  python tests/faults/run.py --quick
  python tests/faults/run.py --only kills --seed 7
  python tests/faults/run.py --only fuzz --only races --out /tmp/faults.json

Exit code 0: nothing got through; 1: something did, and the table says what. The report is written in both cases;
parts that were left out keep what an earlier run wrote."""


class Part(NamedTuple):
    """One kind of attack."""

    run: Callable[[Path, int, int], Iterator[dict[str, Any]]]
    """Attacks below a folder, so many times, with a seed."""
    counted: Callable[[Sequence[dict[str, Any]]], dict[str, Any]]
    fine: Callable[[dict[str, Any]], bool]
    """Whether an attempt ended as it should."""
    whole: int
    """How many attempts `make faults` makes."""
    quick: int


def parts(*, quick: bool) -> Mapping[str, Part]:
    """Every kind of attack by its name in the report. Imports what they need, which takes seconds."""
    import fuzz
    import hostile
    import kills
    import knocks
    import mutations
    import projects
    import races

    def released(folder: Path) -> Path:
        return projects.released_apart(folder / "project")

    def race(folder: Path, at_once: int, seed: int) -> Iterator[dict[str, Any]]:
        return races.attack(folder, at_once, seed, races.RACES[2:3] if quick else races.RACES)

    def handed_in(folder: Path, _n: int, seed: int) -> Iterator[dict[str, Any]]:
        yield from hostile.attack(released(folder), seed)
        yield from knocks.attack(folder / "knocks", seed)

    chains = kills.QUICK if quick else kills.CHAINS
    return {
        "kills": Part(
            lambda folder, n, seed: kills.attack(folder, n, seed, chains),
            kills.counted,
            lambda record: record["outcome"] == kills.FINE,
            60,
            5,
        ),
        "mutations": Part(
            lambda folder, n, seed: mutations.attack(released(folder), n, seed),
            mutations.counted,
            lambda record: record["outcome"] == mutations.FINE,
            220,
            30,
        ),
        "fuzz": Part(
            lambda _folder, n, seed: fuzz.attack(n, seed),
            fuzz.counted,
            lambda record: not record["faults"],
            1_000_000,
            20_000,
        ),
        "hostile": Part(
            handed_in,
            hostile.counted,
            lambda record: record["outcome"] in hostile.FINE,
            0,
            0,
        ),
        "races": Part(race, races.counted, lambda record: record["outcome"] == races.FINE, 10, 3),
    }


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python tests/faults/run.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = ("kills", "mutations", "fuzz", "hostile", "races")
    top.add_argument("--only", action="append", choices=names, metavar="PART", help=", ".join(names))
    top.add_argument("--seed", type=int, default=SEED, metavar="N", help=f"default: {SEED}")
    top.add_argument("--quick", action="store_true", help="a part of a minute or two of each; writes no report")
    top.add_argument(
        "--out", type=Path, metavar="PATH", help="where the report goes; default: data/reports/faults.json"
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Attack, print the table and write the report. 0: nothing got through."""
    arguments = parser().parse_args(argv)
    determinism.pin()
    print(f"seed {arguments.seed}", file=sys.stderr)
    out = arguments.out or (None if arguments.quick else REPORT)
    report = _kept(out)
    through: dict[str, list[dict[str, Any]]] = {}
    for name, part in parts(quick=arguments.quick).items():
        if arguments.only and name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory(prefix=f"clinrl-{name}-") as folder:
            total = part.quick if arguments.quick else part.whole
            records = list(part.run(Path(folder), total, arguments.seed))
        report[name] = part.counted(records)
        through[name] = [record for record in records if not part.fine(record)]
        table(name, records, through[name])
        if out is not None:
            write_json(out, {"seed": arguments.seed, **report})
    return 1 if any(through.values()) else 0


def _kept(out: Path | None) -> dict[str, Any]:
    import json

    if out is None or not out.exists():
        return {}
    held: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    held.pop("seed", None)
    return held


def table(name: str, records: Sequence[dict[str, Any]], through: Sequence[dict[str, Any]]) -> None:
    """Print how often each thing was attempted and how it ended, then each attempt that got through."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    shown = Table("what", "attempts", "got through", title=name)
    for what, count in Counter(_group(record) for record in records).items():
        shown.add_row(what, str(count), str(sum(_group(record) == what for record in through)))
    console.print(shown)
    for record in through:
        where = record.get("where") or record.get("at") or record.get("command") or ""
        console.print(f"{name}: {record['what']} {where}: {record['outcome']}", markup=False, highlight=False)


def _group(record: dict[str, Any]) -> str:
    return str(record.get("area") or record["what"].split(":")[0])


if __name__ == "__main__":
    sys.exit(main())
