"""What Prefect adds: the demo series by a flow against `dvc repro` and `clinrl register`, and a retraining of nothing.

Both build the series from its committed base in a project of their own, with no cache, so that every stage runs.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import laid
from clinrl import paths
from clinrl.config.files import merge_files, read_files
from clinrl.config.params import load_params
from clinrl.runtime import determinism

ROOT = Path(__file__).parents[2]
TIMES = 3
LAST = "esi-v49"
"""The end of the lineage that is built, as by `make demo`. Its release is decided on: a waiver would end that."""
REFUSED = 1
"""Exit code of a release whose gate says no, as it may where training gives other bytes: that is an outcome too."""
DVC, CLINRL = ("-m", "clinrl.runtime.dvc_command"), ("-m", "clinrl")
"""DVC as flows and `make demo` run it: `dvc` itself reads and writes all of dvc.lock for each stage."""


def project(folder: Path, names: tuple[str, ...]) -> Path:
    """The project as it is committed, with some versions: no data set, no adapter, no report, nothing to draft from.

    The versions are of one task, their ancestors are among them, and the folder is none of git's.
    """
    folder.mkdir()
    for name in ("dvc.yaml", "dvc.lock"):
        shutil.copyfile(ROOT / name, folder / name)
    tree, _ = merge_files(read_files(ROOT / "params.yaml"))
    tree["versions"] = {name: tree["versions"][name] for name in names}
    tree |= {"protocols": {"bases": {}, "versions": {}}, "merges": {"folds": {}, "blends": {}}}
    tree |= {
        section: {} for section in ("mining", "external", "comparisons", "rivals", "schedules", "watches", "plans")
    }
    task = tree["versions"][names[0]]["task"]
    for section in ("bases", "gates"):
        tree[section] = {name: block for name, block in tree[section].items() if name == task}
    laid.lay(folder, tree)
    for part in (paths.base(task), paths.adapter(f"{task}-base")):
        shutil.copytree(ROOT / part, folder / part)
    checked = "data/reports/params.json"  # in git, as the base is: flows bring stages up to date, and not the check
    (folder / checked).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / checked, folder / checked)
    run(folder, *DVC, "init", "--no-scm", "--quiet")
    return folder


def run(folder: Path, *words: str, ends: tuple[int, ...] = (0,), says: str = "") -> float:
    """Run a command in a folder, which must end with one of these codes and say this. Returns its wall time (s)."""
    private = ("PREFECT_", "MLFLOW_TRACKING_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(private)}
    env |= {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in ends or says not in done.stderr:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}, {says!r} wanted: {done.stdout}{done.stderr}")
    return time.perf_counter() - started


def main() -> None:
    """Print the rows."""
    params = load_params()
    task, lineage = params.versions[LAST].task, params.lineage(LAST)
    with tempfile.TemporaryDirectory(prefix="clinrl-bench-") as folder:
        plain, flow = (project(Path(folder) / kind, lineage) for kind in ("plain", "flow"))
        by_dvc = run(plain, *DVC, "repro", f"evaluate@{LAST}")
        by_dvc += sum(run(plain, *CLINRL, "register", name) for name in lineage)
        by_flow = run(flow, "-m", "flows", "reproduce", LAST)
        run(flow, "-m", "flows", "release", LAST, "--approver", "Bench", ends=(0, REFUSED))
        again = ("-m", "flows", "retrain", task)
        nothing = statistics.median(run(flow, *again, says="nothing to do") for _ in range(TIMES))
    note, more = f"{len(lineage)} versions", f"{by_flow - by_dvc:.1f} s, with a server and a new database"
    rows = [
        ("demo series, dvc repro and clinrl register", round(by_dvc, 1), "s", note),
        ("demo series, flows.reproduce", round(by_flow, 1), "s", note),
        ("flow overhead", round(100 * (by_flow / by_dvc - 1), 1), "%", more),
        ("retrain, nothing to do", round(nothing, 1), "s", "with a server of its own"),
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    determinism.pin()
    main()
