"""A resit: a champion takes a fresh exam, so that later versions can be compared with it there.

An exam is used up by the decisions that look at it. The champion's own exam stays the one of its report.
"""

from typing import Final

from clinrl import paths
from clinrl.artifacts import exclusive
from clinrl.config.params import Params
from clinrl.errors import ParamsError, did_you_mean
from clinrl.evaluation.answers import SEED
from clinrl.evaluation.evaluate import answer_exam, keep, open_apart
from clinrl.evaluation.sampler import open_journal
from clinrl.models.judges import Judges

POOL: Final = "exam"


def stage(params: Params, name: str) -> None:
    """Let a version or a merge take the exam that `resits` names, and keep its graded answers.

    Raises ParamsError if `resits` in params.yaml does not have `name`, ArtefactError if an input is missing, altered or
    drawn from another pool, DataError if it was trained on patients or texts of the exam, and Busy if another command
    does the same. If it is killed, the same command continues from its journal; on the CPU to the same bytes.
    """
    if name not in params.resits:
        raise ParamsError(f"params.yaml has no resit of {name!r}; {did_you_mean(name, params.resits)}")
    with exclusive(paths.resit(name)):
        run, made_of = open_apart(params, name, params.resits[name].data, POOL, f"a resit is of {POOL} data")
        inputs = {"exam": run.exam_digest, **made_of}
        journal = open_journal(params, run, inputs)
        run = answer_exam(params, run, Judges(paths.base(run.task.name)), journal=journal)
        keep(paths.resit(name), run, inputs, seed=SEED)
        if journal is not None:
            journal.remove()
