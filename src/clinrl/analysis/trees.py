"""Boosted trees on the words and the numbers of a text: the strongest rival that is no language model."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

SEED = 977
ROUNDS, RATE, LEAVES = 600, 0.15, 63
WORDS, NUMBERS = 6000, 300
"""Most columns: of words and pairs of words, chosen by chi-squared, and of numbers, chosen by frequency."""
THREADS = 2
LONGEST = 20_000
"""Characters at the start of a text that are searched for numbers."""
_TOKEN = re.compile(r"[a-z]+|[0-9]{1,6}(?:\.[0-9]{1,3})?|[/%]")


def numbers(text: str) -> dict[str, float]:
    """The numbers of a text, from 0 to below a million, by the tokens around them: `hr #`, `pulse rate #`, `# % on`.

    Each number has five names: from one and two tokens before it, one and two after it, and one on either side. Of
    several numbers with the same name, the first counts.
    """
    tokens = _TOKEN.findall(text[:LONGEST].lower())
    masked = ["", "", *("#" if token[0].isdigit() else token for token in tokens), "", ""]
    found: dict[str, float] = {}
    for i, token in enumerate(tokens):
        if masked[i + 2] == "#":
            first, before, _, after, last = masked[i : i + 5]
            for at in (f"{before} #", f"{first} {before} #", f"# {after}", f"# {after} {last}", f"{before} # {after}"):
                found.setdefault(at, float(token))
    return found


def boosted_trees(texts: Sequence[str], labels: Sequence[Any], exam_texts: Sequence[str]) -> list[Any]:
    """Labels for `exam_texts` by gradient-boosted trees trained on `texts` and `labels`.

    Features are counts of words and pairs of words, and `numbers`. Sizes were chosen on error-mining data.
    Deterministic: one seed, columns in a fixed order; the number of threads changes nothing.
    """
    import lightgbm
    import numpy as np
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.feature_selection import SelectKBest, chi2

    names = sorted(set(labels), key=repr)
    if len(names) == 1:
        return names * len(exam_texts)
    y = [names.index(label) for label in labels]
    # Words without digits: numbers have columns of their own.
    words = CountVectorizer(ngram_range=(1, 2), min_df=0.0005, token_pattern=r"(?u)\b[^\W\d]+\b", dtype=np.float32)
    counts = words.fit_transform(texts)
    chosen = SelectKBest(chi2, k=min(WORDS, counts.shape[1])).fit(counts, y)
    read = [numbers(text) for text in texts]
    common = Counter(name for found in read for name in found)
    columns = sorted(common, key=lambda name: (-common[name], name))[:NUMBERS]

    def table(counts: Any, read: Sequence[dict[str, float]]) -> Any:
        values = [[found.get(name, -1.0) + 1 for name in columns] for found in read]  # 0: no such number
        dense = np.array(values, np.float32).reshape(len(read), -1)
        return hstack([csr_matrix(dense), chosen.transform(counts)], "csr")

    settings = {
        "objective": "multiclass", "num_class": len(names), "learning_rate": RATE, "num_leaves": LEAVES,
        "feature_fraction": 0.3, "seed": SEED, "deterministic": True, "force_col_wise": True, "num_threads": THREADS,
        "verbose": -1,
    }  # fmt: skip
    booster = lightgbm.train(settings, lightgbm.Dataset(table(counts, read), y, params=settings), ROUNDS)
    shares = booster.predict(table(words.transform(exam_texts), [numbers(text) for text in exam_texts]))
    return [names[i] for i in np.asarray(shares).argmax(axis=1)]
