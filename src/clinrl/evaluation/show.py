"""`clinrl show`: prints episodes of an exam from its graded answers, without loading a model."""

import json
from collections.abc import Sequence
from random import Random

from clinrl.analysis.run import Run
from clinrl.config.model import Model
from clinrl.config.params import Params
from clinrl.errors import ParamsError
from clinrl.evaluation.answers import check_here, load_graded, mode_of, open_run
from clinrl.reports.episode import episode_of, write
from clinrl.types import Case, Graded


def stage(
    params: Params,
    name: str,
    episode: str | None,
    *,
    mode: str | None = None,
    random: int | None = None,
    wrong: int | None = None,
    as_json: bool = False,
) -> None:
    """Print one episode of the exam of a version, a merge or a base, or the first `wrong` episodes with a wrong answer.

    `episode` is a case id, the beginning of one, or a number in the order of the exam. It is None with `random`, the
    seed that draws an episode, and with `wrong`. `mode` is one of params.yaml, the first by default. Raises ParamsError
    for an unknown name, mode or episode, ArtefactError if the graded answers or the exam are missing or altered, or if
    the answers are to another exam.
    """
    mode = mode_of(params, mode)
    model = params.model(name)
    check_here(model)
    run = open_run(params, model)
    _, graded = load_graded(run, mode, name)
    found = [
        episode_of(run.model, run.cases[place], graded[place], number=place + 1, of=len(run.cases))
        for place in _places(run, graded, episode, random, wrong)
    ]
    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in found], indent=2, ensure_ascii=False))
    else:
        print("\n".join(write(one) for one in found), end="")


def _places(
    run: Run, graded: Sequence[Graded], episode: str | None, random: int | None, wrong: int | None
) -> list[int]:
    if random is not None:
        return [Random(random).randrange(len(run.cases))]
    if wrong is not None:
        return [i for i, line in enumerate(graded) if is_wrong(run.model, run.cases[i], line)][:wrong]
    return [place([case.id for case in run.cases], episode or "")]


def is_wrong(model: Model, case: Case, line: Graded) -> bool:
    """Whether an answer is not the gold label. Unreadable answers are always wrong."""
    return bool(line.answer != model.task.label(case))


def place(ids: Sequence[str], episode: str) -> int:
    """The index, from 0, of the case with an id, with the beginning of an id, or with a number from 1.

    Raises ParamsError if that fits no case of the exam, or several.
    """
    if episode.isdecimal() and len(episode) < 10:
        if not 1 <= int(episode) <= len(ids):
            raise ParamsError(f"there is no episode {episode}; the exam has those from 1 to {len(ids)}")
        return int(episode) - 1
    found = [i for i, name in enumerate(ids) if episode and name.startswith(episode)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ParamsError(
            f"no case of the exam begins with {episode!r}; give a case id such as {ids[0]}, the beginning of one, or a "
            f"number from 1 to {len(ids)}"
        )
    some = ", ".join(ids[i] for i in found[:3])
    raise ParamsError(f"{len(found)} cases of the exam begin with {episode!r} ({some}{', ...' * (len(found) > 3)})")
