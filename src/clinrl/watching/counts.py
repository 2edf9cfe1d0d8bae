"""Counts of requests and answers by feature and bucket, and the same counts of the exam that the version took.

A feature puts a request into one of its buckets, which come from the exam: its commonest words, quantiles of its
lengths and numbers, its labels. No bucket's name holds any other text of a request.
"""

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from clinrl import paths
from clinrl.analysis import baselines
from clinrl.analysis.exam import column, columns
from clinrl.analysis.run import Run
from clinrl.artifacts import identity
from clinrl.config.params import Params
from clinrl.data.dataset import manifest_of, read_cases
from clinrl.errors import ArtefactError, Refused
from clinrl.evaluation.answers import run_of
from clinrl.evaluation.record import Record, load_record
from clinrl.registry import novelty
from clinrl.tasks.base import Task
from clinrl.tasks.importing import is_imported
from clinrl.types import Case

Counts = Counter[tuple[str, str]]
"""Number of requests by feature and bucket."""
QUANTILES = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
"""The quantiles of a number in the exam's texts that are the edges of its buckets."""
FEWEST = 10
"""Patients of an imported exam on either side of an edge, at the least."""
WORDS, COMMON = 150, 0.02
"""Words that are features: at most this many, each in at least this share of the exam's texts."""
ANSWER, LABELLED, SHADOW = "answer, ", "labelled, ", " in shadow, "
"""Parts of the names of features, before the mode: the answer; the pair of label and answer; and, after the name of a
candidate, whether its answer is the same."""
TEXT = "text"
"""The feature that every request has."""
SAME, OTHER, FAILED = "same", "other", "failed"

_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class Reader:
    """Puts texts into the buckets of an exam."""

    words: tuple[str, ...]
    edges: Mapping[str, Sequence[float]]
    """The edges of the buckets of each feature that is a number."""
    examined: novelty.Examined | None
    readings: Callable[[str], Mapping[str, float]]
    exam: str = ""
    """The digest of the exam."""

    def read(self, text: str) -> Counts:
        """One count for each feature, in the bucket of the text."""
        present, numbers = _words(text), _numbers(text, self.readings)
        found = {f"word {word}": "yes" if word in present else "no" for word in self.words}
        found |= {name: _bucket(numbers.get(name), edges) for name, edges in self.edges.items()}
        return Counts([*found.items(), (TEXT, novelty.judge([text], self.examined))])


def learn(task: Task, cases: Sequence[Case], texts: Sequence[str]) -> Reader:
    """The reader with the buckets of an exam; `texts` are those of its cases. No word of imported cases is kept."""
    import numpy

    readings, values = task.reporting.readings, dict[str, list[float]]()
    for text in texts:
        for name, value in _numbers(text, readings).items():
            values.setdefault(name, []).append(value)
    edges = {
        name: sorted(set(numpy.quantile(values[name], QUANTILES, method="inverted_cdf").tolist()))
        for name in sorted(values)
    }
    if any(map(is_imported, cases)):  # rounded, and with some patients on either side: no edge is the value of one
        rounded = {name: sorted({float(f"{edge:.2g}") for edge in of}) for name, of in edges.items()}
        read = [(case.group, _numbers(text, readings)) for case, text in zip(cases, texts, strict=True)]
        for name, of in rounded.items():
            known = [(group, numbers[name]) for group, numbers in read if name in numbers]
            below, above = ({e: {g for g, n in known if (n < e) is side} for e in of} for side in (True, False))
            rounded[name] = [edge for edge in of if min(len(below[edge]), len(above[edge])) >= FEWEST]
        return Reader((), rounded, None, readings)
    common = Counter(word for text in texts for word in _words(text))
    kept = sorted((word for word, n in common.items() if n >= COMMON * len(texts)), key=lambda w: (-common[w], w))
    examined = novelty.learn([[text] for text in texts], [case.group for case in cases])
    return Reader(tuple(kept[:WORDS]), edges, examined, readings)


def reference(params: Params, name: str, digest: str, candidates: Sequence[str] = ()) -> tuple[Reader, Counts]:
    """The reader and the counts of the exam of a version or a merge.

    The counts are of texts, of answers, and of how often each of the `candidates`, named as by `shadow`, gave the same
    or another answer, if it took the same exam and its record is here. Raises ArtefactError if the exam or the record
    of its answers is missing, or about another adapter than `digest`.
    """
    run, record = _examined(params, name)
    if record.adapter_digest != digest:
        path = paths.exam_record(run.task.name, name)
        raise ArtefactError(f"{path} is about another {name} than is registered; run `dvc repro {run.model.stage}`")
    texts = [baselines.text(run.task, case) for case in run.shown]
    reader = replace(learn(run.task, run.cases, texts), exam=record.exam_digest)
    counts = sum((reader.read(text) for text in texts), Counts())
    given = {mode: [column(one) for one in record.given[mode].answers] for mode in run.modes if mode in record.given}
    for mode, answers in given.items():
        counts.update((ANSWER + mode, answer) for answer in answers)
        counts.update({(ANSWER + mode, one): 0 for one in columns(run.task)})  # tested even where the exam has none
    for name, of in reader.edges.items():
        counts.update({(name, _bucket(value, of)): 0 for value in (None, -math.inf, *of)})
    for candidate in candidates:
        candidate_name, _, digest_start = candidate.removesuffix(SHADOW).partition("@")
        try:
            other = _examined(params, candidate_name)[1]
        except Refused:  # only this candidate is left out; the version's own features do not depend on it
            continue
        is_same = other.exam_digest == record.exam_digest and other.adapter_digest.startswith(digest_start)
        for mode in sorted(given.keys() & other.given.keys()) if is_same else ():
            both = zip(given[mode], map(column, other.given[mode].answers), strict=True)
            counts.update((candidate + mode, SAME if a == b else OTHER) for a, b in both)
    return reader, counts


def exam_digest(params: Params, name: str) -> str:
    """The digest of the exam of a version or a merge, as it is here. Raises ArtefactError if it is missing."""
    model = params.model(name)
    return identity(manifest_of(paths.cases(model.exam), model.task))


def key(digest: str, exam: str) -> str:
    """The name under which counts of a version are stored: buckets of another exam are others, with like names."""
    return f"{digest} {exam[:16]}"


def shadow(name: str, digest: str) -> str:
    """The start of the features of a candidate's answers in shadow: its name and the start of its adapter's digest."""
    return f"{name}@{digest[:8]}{SHADOW}"


def _examined(params: Params, name: str) -> tuple[Run, Record]:
    model = params.model(name)
    folder = paths.cases(model.exam)
    exam = exam_digest(params, name)
    run = run_of(params, model, list(read_cases(folder, model.task)), exam)
    record = load_record(run, name)
    if record.exam_digest != exam:
        raise ArtefactError(f"{name} took another exam than {folder} holds; run `dvc repro {model.stage}`")
    return run, record


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.lower()))


def _numbers(text: str, readings: Callable[[str], Mapping[str, float]]) -> dict[str, float]:
    return {"length in words": float(len(text.split())), **readings(text)}


def _bucket(value: float | None, edges: Sequence[float]) -> str:
    if value is None:
        return "absent"
    place = bisect_right(edges, value)
    low = f"from {edges[place - 1]:g}" if place else ""
    return f"{low} below {edges[place]:g}".strip() if place < len(edges) else low or "present"
