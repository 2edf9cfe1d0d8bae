"""The rows that any trained model has to beat: constants, guesses, and a bag of words that learned from gold labels.

The bag of words sees the same user turn as the model, and the gold labels of the training cases that it is given. If it
does as well as the model, the exam can be passed without reading.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Any

from clinrl.tasks.base import Task
from clinrl.tasks.policies import SIMPLE
from clinrl.types import Case

SEED = 977
"""Fixed, so that a guessing row changes with the exam alone."""
STRENGTHS = (1.0, 10.0)
"""Candidates for C, the inverse of the L2 penalty."""
FOLDS = 3

RANDOM, PRIOR, BAG_OF_WORDS = SIMPLE


def answers(task: Task, exam: Sequence[Case], training: Sequence[Case]) -> dict[str, list[Any]]:
    """Answers to the exam by row name, in exam order. Without training cases, the rows that learn are left out.

    For a task of episodes, the rows are the task's policies.
    """
    if task.episodes is not None:
        return {
            name: [task.parse(policy(case, Random(f"{SEED}/{name}/{case.id}"))) for case in exam]
            for name, policy in task.policies().items()
        }
    rows: dict[str, list[Any]] = {f"always {label}": [label] * len(exam) for label in task.labels}
    rows[RANDOM] = guesses(task.labels, [1] * len(task.labels), len(exam))
    if training:
        labels = [task.label(case) for case in training]
        counts = Counter(labels)
        rows[PRIOR] = guesses(task.labels, [counts[label] for label in task.labels], len(exam))
        texts, exam_texts = ([text(task, case) for case in cases] for cases in (training, exam))
        groups = (case.group for case in training)
        rows[BAG_OF_WORDS] = [*bag_of_words(tuple(texts), tuple(labels), tuple(groups), tuple(exam_texts))]
    return rows


def text(task: Task, case: Case) -> str:
    """The text that a model reads about a case: the user turns of its prompt."""
    return "\n".join(message.content for message in task.prompt(case.facts) if message.role == "user")


def guesses(labels: Sequence[Any], weights: Sequence[float], n: int) -> list[Any]:
    """`n` draws of a label with these weights, the same in every run."""
    return Random(SEED).choices(labels, weights, k=n)


@lru_cache(maxsize=2)
def bag_of_words(
    texts: tuple[str, ...], labels: tuple[Any, ...], groups: tuple[str, ...], exam_texts: tuple[str, ...]
) -> tuple[Any, ...]:
    """Labels for `exam_texts` by logistic regression on TF-IDF of words, or of words and word pairs.

    Classes weigh the same, whatever their counts: an exam may have another mix than the training cases, and without
    the weights the classifier would hardly predict a rare label. Word pairs and C are chosen by 3-fold cross-validation
    on the training cases only, by mean recall; a template (group) is never in two folds, as it is never in two pools.
    Ties go to the simpler candidate. Deterministic. A call takes seconds on thousands of cases, so the last two results
    are cached by all arguments.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import balanced_accuracy_score
    from sklearn.model_selection import GroupKFold
    from threadpoolctl import threadpool_limits

    if len(set(labels)) == 1:
        return (labels[0],) * len(exam_texts)
    names = sorted(set(labels), key=repr)
    y = [names.index(label) for label in labels]

    def fit(x: Any, strength: float, rows: Sequence[int]) -> Any:
        weighted = LogisticRegression(C=strength, max_iter=300, tol=1e-3, class_weight="balanced")
        with threadpool_limits(1):  # on matrices this sparse a second thread only waits for the first
            return weighted.fit(x[rows], [y[row] for row in rows])

    found: list[tuple[float, int, float, Any, Any]] = []
    for pairs in (1, 2):
        words = TfidfVectorizer(ngram_range=(1, pairs), sublinear_tf=True, min_df=2, token_pattern=r"(?u)\b\w+\b")
        x = words.fit_transform(texts)
        folds = list(GroupKFold(FOLDS).split(x, y, groups)) if len(set(groups)) >= FOLDS else []
        for strength in STRENGTHS:
            guessed = {
                int(row): int(answer)
                for learn, check in folds
                if len({y[row] for row in learn}) > 1
                for row, answer in zip(check, fit(x, strength, learn).predict(x[check]), strict=True)
            }
            recall = balanced_accuracy_score([y[row] for row in guessed], list(guessed.values())) if guessed else 0.0
            found.append((float(recall), -pairs, -math.log(strength), words, x))
    _, _, negative_log, words, x = max(found, key=lambda candidate: candidate[:3])
    best = fit(x, math.exp(-negative_log), range(len(y)))
    return tuple(names[i] for i in best.predict(words.transform(exam_texts)))
