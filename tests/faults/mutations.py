"""Two hundred places altered by hand, one at a time, in a project with a champion: is it seen before it is used?

Seen: each thing that a user does next with what was altered is refused in one sentence, or `clinrl lineage` calls a
link broken, absent or unrecorded. Unseen: anything went on as if nothing had happened, or ended with a traceback.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import attempts
import damage
import forgery
import projects
from attempts import Record, forked
from projects import NAME

from clinrl.cli import main as cli
from clinrl.config.params import load_params
from clinrl.errors import Refused
from clinrl.release import lineage
from clinrl.signing import keys

HERE = Path(__file__).resolve().parent
FINE = "seen"


class Area(NamedTuple):
    """Files that are attacked alike, how, and what uses them."""

    files: Sequence[str]
    """Glob patterns below the project."""
    damages: Sequence[damage.Damage]
    uses: Sequence[str]
    """Each that acts must be refused; where none does, `lineage` must say so. Names of `USES`, or `load`."""
    share: int
    """How many of two hundred mutations."""


FOLDER = (
    damage.flip, damage.truncate, damage.edit, damage.reorder, damage.remove, damage.add, damage.link, damage.swap,
    damage.reseal,
)  # fmt: skip
FILE = (damage.flip, damage.truncate, damage.edit, damage.remove, damage.link)
RELEASE = ("register", "promote", "lineage")
"""`promote` decides first. Where something acts, `lineage` is recorded beside it, and is not what has to refuse."""
STORE = "mlruns/artifacts/esi/models/CHAMPION/artifacts"
"""CHAMPION stands for MLflow's name of the champion's model."""

AREAS: Mapping[str, Area] = {
    "adapter": Area(["data/adapters/v[12]/*"], [*FOLDER, damage.lock_to_fit], RELEASE, 24),
    "base": Area(["data/bases/esi/*", "data/adapters/esi-base/*"], FOLDER, RELEASE, 12),
    "cases": Area(["data/cases/*/*"], [*FOLDER, damage.lock_to_fit], RELEASE, 18),
    "graded": Area(
        ["data/graded/v[12]/*"],
        [*FOLDER, damage.swap_modes, damage.claim_right, damage.claim_right, damage.lock_to_fit],
        RELEASE,
        24,
    ),
    "data proof": Area(["data/reports/data/*.json"], FILE, RELEASE, 10),
    "probe proof": Area(["data/reports/probe/v[12].json"], [*FILE, damage.swap], RELEASE, 10),
    "report": Area(
        ["data/reports/v2/*.json"],
        [*FILE, damage.swap, damage.swap_modes, damage.better_number, damage.better_number],
        RELEASE,
        20,
    ),
    "lock": Area(
        ["dvc.lock"],
        [forgery.another_digest, forgery.forgotten_stage, forgery.exchanged_digests, damage.truncate],
        RELEASE,
        12,
    ),
    "cache": Area(["data/adapters/v2/*", "data/graded/v2/*"], [forgery.in_cache], ["restore"], 6),
    "store": Area(
        [f"{STORE}/*", f"{STORE}/adapter/*", f"{STORE}/base/*", f"{STORE}/code/*.py", f"{STORE}/code/clinrl/**/*"],
        [
            damage.flip, damage.append, damage.edit, damage.remove, damage.add, forgery.served_again, forgery.disarm,
            forgery.another_loader,
        ],
        ["load"],
        28,
    ),
    "tags": Area(["mlruns/mlflow.db"], [forgery.tag, forgery.tag, forgery.alias, forgery.source], ["lineage"], 12),
    "audit file": Area(
        ["data/reports/decisions.jsonl"],
        [
            damage.edit, damage.drop_line, damage.repeat_line, damage.reorder, forgery.cut_end, forgery.rewritten_chain,
            forgery.rewritten_chain, forgery.backdated, forgery.forged_line, damage.remove,
        ],
        ["lineage"],
        16,
    ),
    "signature": Area(
        ["data/**/*.sig", "mlruns/**/*.sig"], [damage.flip, damage.truncate, damage.remove, damage.swap], ["lineage"], 8
    ),
    "attestation": Area(
        [".clinrl/provenance/*.json"],
        [damage.flip, damage.edit, damage.truncate, damage.swap],
        ["register", "lineage"],
        6,
    ),
    "bill of materials": Area(
        ["data/**/*.cdx.json", "mlruns/**/*.cdx.json"], [damage.flip, damage.edit, damage.remove], ["lineage"], 4
    ),
    "approvers": Area(["params.yaml"], [forgery.other_key], ["lineage"], 4),
}  # fmt: skip
"""What is attacked. An area without a file, as signatures were once, is left out, and its share with it."""


def _lineage() -> None:
    params = load_params(Path("params.yaml"))
    for link in lineage.walk(params, NAME):
        if link.state in ("broken", "absent", "unrecorded"):
            raise Refused(f"{link.version}, {link.link}: {link.says}")


def _register() -> None:
    _said(cli.main(["register", NAME]))


def _promote() -> None:
    projects.promote(load_params(Path("params.yaml")))


def _restore() -> None:
    """What DVC brings back from its cache, and the check of what came."""
    shutil.rmtree("data/adapters/v2")
    shutil.rmtree("data/graded/v2")
    if projects.dvc("checkout", "train@v2", "evaluate@v2"):
        raise Refused("dvc checkout refused")
    _lineage()


def _said(code: int) -> None:
    """A command's sentence went to stderr, which the outcome holds."""
    if code:
        raise Refused("")


USES: Mapping[str, Callable[[], None]] = {
    "lineage": _lineage, "register": _register, "promote": _promote, "restore": _restore,
}  # fmt: skip
"""What a user does next, in a process of its own. `load` is a colleague's, without clinrl: see `loading`."""


class Colleague:
    """The process that loads models as somebody does who has neither checkout nor data."""

    def __init__(self, keys: Path) -> None:
        self.keys = keys
        """Whose signatures the colleague trusts: a copy, since a colleague has one."""
        self.process: subprocess.Popen[str] | None = None

    def load(self, project: Path) -> attempts.Outcome:
        """How loading the champion ended. The process starts with the first one."""
        if self.process is None:
            command = [sys.executable, str(HERE / "loading.py")]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._hears()
        assert self.process.stdin is not None
        ask = {
            "store": f"sqlite:///{project}/mlruns/mlflow.db",
            "model": "models:/esi@champion",
            "keys": str(self.keys),
        }
        print(json.dumps(ask), file=self.process.stdin, flush=True)
        answer = self._hears()
        kinds, says = answer["raised"], " ".join(str(answer["says"]).split())
        if not kinds:
            return attempts.Outcome(attempts.WENT_ON, "", 0.0)
        # What the folder's own code raises while it is imported is no refusal: it ran.
        by_name = {"Refused", "Untrusted"} & set(kinds)
        return attempts.Outcome(attempts.REFUSED if by_name else attempts.RAISED, f"{kinds[0]}: {says}", 0.0)

    def _hears(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        heard: dict[str, Any] = json.loads(self.process.stdout.readline() or '{"raised": ["died"], "says": ""}')
        return heard

    def end(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


class Place(NamedTuple):
    """One mutation that is to be made."""

    area: str
    path: str
    damage: str
    seed: int


def planned(project: Path, total: int, seed: int) -> list[Place]:
    """Which places are attacked, the same for the same project and seed: each area by its share, each of its damages
    before one comes twice."""
    present = {name: _files(project, area) for name, area in AREAS.items()}
    shares = {name: AREAS[name].share for name, files in present.items() if files}
    whole = sum(shares.values())
    places = []
    for name, share in shares.items():
        random = Random(f"{seed} {name}")
        ways = list(AREAS[name].damages)
        random.shuffle(ways)
        for number in range(max(1, round(total * share / whole))):
            path = random.choice(present[name])
            places.append(Place(name, path, ways[number % len(ways)].__name__, random.randrange(10**9)))
    return places


def _files(project: Path, area: Area) -> list[str]:
    patterns = [pattern.replace("CHAMPION", _champions(project)) for pattern in area.files]
    found = {path for pattern in patterns for path in project.glob(pattern) if path.is_file()}
    return sorted(str(path.relative_to(project)) for path in found if path.suffix != ".pyc")


def _champions(project: Path) -> str:
    """MLflow's name of the champion's model: that of the folder whose served.json names it."""
    for record in sorted(project.glob("mlruns/artifacts/esi/models/*/artifacts/served.json")):
        if json.loads(record.read_text())["name"] == NAME:
            return record.parents[1].name
    return "absent"


def _uses(place: Place, *, one: bool) -> Sequence[str]:
    """What is done after a mutation: all uses of its area, or one that its seed picks among those that must refuse."""
    every = AREAS[place.area].uses
    acting = [use for use in every if use != "lineage"] or every
    return [acting[place.seed % len(acting)]] if one else every


def attack(project: Path, total: int, seed: int, *, one_use: bool = False) -> Iterator[Record]:
    """Alter one place after the other in a project, which is put back each time, and record what saw it.

    `project` is one that `projects.released` has built. With `one_use` one thing is done after each mutation, not all
    that its area names. Fails if a use is refused before anything is altered.
    """
    pristine = project.with_name(f"{project.name}-pristine")
    shutil.copytree(project, pristine, symlinks=True)
    colleague = Colleague(pristine / keys.PUBLIC)
    plan = planned(project, total, seed)
    projects.learned(project)
    try:
        for use in {use for place in plan for use in _uses(place, one=one_use)}:
            outcome = _used(project, use, colleague)
            assert outcome.kind == attempts.WENT_ON, f"{use} is refused in a sound project: {outcome.says}"
            _put_back(pristine, project)
        for place in attempts.each(plan, "mutations", len(plan)):
            record = _attempt(project, place, colleague, _uses(place, one=one_use))
            if record is not None:
                yield record
            _put_back(pristine, project)
    finally:
        colleague.end()
        shutil.rmtree(pristine)


def _attempt(project: Path, place: Place, colleague: Colleague, uses: Sequence[str]) -> Record | None:
    """One mutation and all that is done after it; None if this place cannot be altered this way."""
    files, champions = _files(project, AREAS[place.area]), _champions(project)
    # Another file of the same area where this one has no lines to exchange, or no field to change.
    others = Random(place.seed).sample(files, len(files))
    done = forked(partial(_altered, project, [place._replace(path=path) for path in (place.path, *others)]))
    assert done.kind == attempts.WENT_ON, f"{place}: {done.says}"
    if done.value is None:
        return None
    path, said = done.value
    saw, missed = [], []
    for use in uses:
        outcome = _used(project, use, colleague)
        if outcome.kind == attempts.REFUSED:
            saw.append((use, outcome))
        elif use != "lineage" or AREAS[place.area].uses == ["lineage"]:
            missed.append((use, outcome))
    sentence = next((outcome.says for _, outcome in saw), "")
    return {
        "area": place.area,
        "where": path.replace(champions, "*"),
        "what": said,
        "seed": place.seed,
        "seen_by": [use for use, _ in saw],
        "outcome": FINE if not missed else f"unseen: {', '.join(_missed(use, o) for use, o in missed)}",
        "says": sentence[:200],
    }


def _missed(use: str, outcome: attempts.Outcome) -> str:
    return f"{use} {outcome.kind}" + (f" ({outcome.says[:120]})" if outcome.says else "")


def _altered(project: Path, places: Sequence[Place]) -> tuple[str, str] | None:
    """Alter the first place that can be altered in its way: the path and what was done."""
    with chdir(project):
        for place in places:
            way = next(way for way in AREAS[place.area].damages if way.__name__ == place.damage)
            if (said := way(Path(place.path), Random(place.seed))) is not None:
                return place.path, said
    return None


def _used(project: Path, use: str, colleague: Colleague) -> attempts.Outcome:
    if use == "load":
        return colleague.load(project)

    def do() -> None:
        with chdir(project):
            USES[use]()

    return forked(do)


def _put_back(pristine: Path, project: Path) -> None:
    shutil.rmtree(project)
    shutil.copytree(pristine, project, symlinks=True)
    for left in project.parent.glob("elsewhere-*"):
        left.unlink()


def counted(records: Sequence[Record]) -> dict[str, Any]:
    """What the report says of mutations."""
    return {
        "n": len(records),
        "unseen": sum(record["outcome"] != FINE for record in records),
        "attempts": list(records),
    }
