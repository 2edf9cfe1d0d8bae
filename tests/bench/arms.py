"""What a second worker brings: imaging's eight arms built by `python -m flows build` on one worker and on two.

Each worker has one processor, a clone and a cache of its own, and of its processor SHARE of the time: the rest is for
PostgreSQL, S3, Prefect, MLflow and the build, which a team runs on a machine of their own. One worker alone has no more
of its processor than each of two. Two workers must make the same files as one. How many of them `dvc.lock` records too
is a row: on a processor of another maker than the committed versions were trained on, GRPO's differ (docs/concepts.md
says why).

  CLINRL_TEST_MOTO=/opt/moto/bin/moto_server python tests/bench/run.py arms.py
"""

import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import plant
from bench import overhead
from clinrl.config.params import load_params
from clinrl.provenance import lock
from clinrl.runtime import determinism

ROOT = Path(__file__).parents[2]
OF_GIT = (".gitignore", ".dvcignore", ".dvc/.gitignore", ".dvc/config", "prefect.yaml")
ARMS = tuple(
    f"imaging-{kind}{arm}-1"
    for kind in ("published-", "")
    for arm in ("baseline", "citations", "llm-eval", "custom-embedding")
)
"""Four published reward designs and four corrected ones, one seed each."""
SHARE = 0.7
"""How much of its processor a worker has: two leave the servers what they need on a machine of two processors."""


def built(folder: Path, names: tuple[str, ...], workers: int) -> tuple[float, dict[str, str], dict[str, float]]:
    """How long it takes so many workers to build versions (s), and DVC's digests of what they made, by path.

    And the processor time of each process (s).
    """
    folder.mkdir()
    with ExitStack() as stack:
        servers = plant.Plant(folder, stack)
        checkout, origin = overhead.project(folder / "checkout", names), folder / "origin"
        overhead.run(checkout, *overhead.DVC, "repro", "params")  # as in a checkout that has checked its parameters
        for name in OF_GIT:
            shutil.copyfile(ROOT / name, checkout / name)
        shutil.copytree(ROOT / "flows", checkout / "flows", ignore=shutil.ignore_patterns("__pycache__"))
        servers.publish(checkout, origin)
        servers.deploy(origin)
        for number in range(workers):
            servers.worker(f"worker-{number}", processor=number, share=SHARE)
        what = load_params(checkout / "params.yaml").versions[names[0]].task
        begun = time.perf_counter()
        build, spent = servers.build(what, checkout), dict[str, float]()
        while build.poll() is None:
            spent = servers.processor_s()  # of the build too, so before it ends
            time.sleep(1)
        took = time.perf_counter() - begun
        if build.returncode:
            raise SystemExit(f"the build ended with {build.returncode}: {(folder / 'build.log').read_text()[-4000:]}")
        plant.run("git", "pull", "-q", "origin", f"built/{what}", cwd=checkout, env=servers.env)
        stages = [f"{kind}@{name}" for name in names for kind in ("train", "evaluate")]
        return took, lock.outputs(lock.read(checkout / "dvc.lock"), stages), spent


def main() -> None:
    """Print the rows."""
    if missing := [mark.kwargs["reason"] for mark in plant.NEEDS if mark.args and mark.args[0]]:
        raise SystemExit(f"arms.py {missing[0]}")
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("arms.py needs two processors")
    if not os.access(plant.GROUPS, os.W_OK):
        raise SystemExit(f"arms.py needs the right to make a control group in {plant.GROUPS}")
    took: dict[int, float] = {}
    made: dict[int, dict[str, str]] = {}
    spent: dict[int, dict[str, float]] = {}
    for workers in (1, 2):
        with tempfile.TemporaryDirectory(prefix="clinrl-bench-") as folder:
            took[workers], made[workers], spent[workers] = built(Path(folder) / "team", ARMS, workers)
        parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in spent[workers].items())
        print(f"{workers} workers: {took[workers]:.0f} s; processor time: {parts}", file=sys.stderr, flush=True)
    if differing := sorted(path for path in made[1].keys() | made[2].keys() if made[1].get(path) != made[2].get(path)):
        raise SystemExit(f"two workers made another {differing[0]} than one; {len(differing)} differ")
    recorded = lock.outputs(lock.read(ROOT / "dvc.lock"))
    equal = sum(recorded.get(path) == digest for path, digest in made[2].items())
    works = {count: sum(time for name, time in of.items() if name.startswith("worker-")) for count, of in spent.items()}
    note = f"{len(ARMS)} arms of imaging, {SHARE} of a processor each; two workers' files are those of one"
    rows = [
        ("imaging's arms, one worker", round(took[1], 1), "s", note),
        ("imaging's arms, two workers", round(took[2], 1), "s", note),
        ("imaging's arms, one worker against two", round(took[1] / took[2], 2), "ratio", note),
        ("imaging's arms, processor time of one worker", round(works[1], 1), "s", "with all that it started"),
        ("imaging's arms, processor time of two workers", round(works[2], 1), "s", "with all that they started"),
        (
            "imaging's arms, processor time of servers beside them",
            round(sum(spent[2].values()) - works[2], 1),
            "s",
            "and of the build, which registers",
        ),
        ("imaging's arms, files as dvc.lock records them", equal, "files", f"of {len(made[2])}"),
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    determinism.pin()
    main()
