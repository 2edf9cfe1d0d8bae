"""Builds a wheel of the package that contains a small project, so that `clinrl try` works without a checkout.

It is built from committed files and from adapters in dvc.lock, so equal commits give equal bytes. RECORD in the wheel
has the SHA-256 of each file. Adapters and bases also have manifests, which are verified when they are loaded.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from clinrl import paths
from clinrl.artifacts import files_of, sha256_file
from clinrl.config.params import load_params
from clinrl.errors import ArtefactError, DataError, with_exit_code
from clinrl.evaluation.answers import may_repeat_records
from clinrl.models import opening
from clinrl.pipeline.verify import git, output_of
from clinrl.provenance import lock

CODE = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "src")


def build(names: Sequence[str], out: Path) -> Path:
    """Write the wheel with these versions, one per task, to the folder `out`, and return its path.

    Raises ArtefactError if a tracked file differs from its commit, or if a version, its base or its exam differs from
    dvc.lock, and DataError for a version that was trained on imported data.
    """
    if git(Path.cwd(), "status", "--porcelain", "--untracked-files=no"):
        raise ArtefactError("tracked files are not as they were committed; commit or stash them first")
    params = load_params()
    models = [params.model(name) for name in names]
    for model in models:
        lock.demand(params, model.name)
        opening.check(model.folder)  # the weights must be safetensors
        if may_repeat_records(params, model):
            raise DataError(f"{model.name} learned from somebody's records and may repeat them; ship another")
    exams = {model.exam for model in models} & params.datasets.keys()  # answers to imported cases stay here
    project = [
        *("params.yaml", "params"),
        *(str(paths.base(model.task.name)) for model in models),
        *(str(paths.report(model.name) / f"{mode}.json") for model in models for mode in params.modes),
        *(str(paths.exam_record(rival.task, name)) for name, rival in params.rivals.items() if rival.exam in exams),
    ]
    with tempfile.TemporaryDirectory() as folder:
        shipped = Path(folder) / "src/clinrl/shipped"
        _extract(CODE, Path(folder))
        _extract(project, shipped)
        for file in [file for model in models for file in files_of(model.folder)]:
            (shipped / file).parent.mkdir(parents=True, exist_ok=True)
            (shipped / file).write_bytes(file.read_bytes())
            (shipped / file).chmod(0o644)  # DVC's own copies are read-only
        dated = os.environ | {"SOURCE_DATE_EPOCH": git(Path.cwd(), "log", "-1", "--format=%ct").strip()}
        options = ["--no-deps", "--no-build-isolation", "--no-cache-dir", "--quiet", "--wheel-dir=wheel", "."]
        subprocess.run([sys.executable, "-m", "pip", "wheel", *options], cwd=folder, env=dated, umask=0o022, check=True)
        (wheel,) = Path(folder, "wheel").glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))  # move works across file systems


def _extract(names: Iterable[str], folder: Path) -> None:
    """Write committed files to a folder, with the modes that git has, whatever the umask."""
    archive = output_of(["git", "-c", "tar.umask=0022", "archive", "HEAD", *names], Path.cwd())
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-xpf", "-", "-C", folder], input=archive, check=True)


@with_exit_code
def main(argv: Sequence[str] | None = None) -> int:
    """Build the wheel and print its SHA-256 and its path."""
    parser = argparse.ArgumentParser(prog="python -m clinrl.pipeline.wheel", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="VERSION", help="what is shipped, one version a task")
    parser.add_argument("--out", type=Path, default=Path("dist"), metavar="DIR", help="default: dist")
    arguments = parser.parse_args(argv)
    wheel = build(arguments.names, arguments.out)
    print(f"{sha256_file(wheel)}  {wheel}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
