"""The path of each artefact of each name, relative to the project root. No other module knows these paths.

The project root is the working directory; every command starts there, as DVC does.
"""

from collections.abc import Callable
from pathlib import Path

LIVE_FILE = "live.jsonl"
"""The history so far of a running training, for those who follow it."""
TRAINING_FILE = "training.json"
"""The task, version and recipe of a running training, for those who follow it."""
CASES_FILE = "cases.jsonl"
REFUSED_FILE = "refused.tsv"
IMPORT_FILE = "import.json"
"""Counts of the rows of an import's source by what became of them. Only an imported data set has this file."""
EXPORTS = Path("data/exports")
"""Folder of exports for other tools, which can be written again at any time. Git and DVC ignore it."""
PARAMS_PROOF = Path("data/reports/params.json")
"""Proof that params.yaml was checked: a constant, which every stage depends on."""
CHAMPIONS = Path(".clinrl/champions")
"""Folder of the answers of champions, and of the locks on their aliases."""
LOCKS = Path(".clinrl/locks")
"""Folder of the locks for work that one process at a time may do in this checkout."""
SITE = Path("build/site")
"""The pages of `clinrl site`, which git ignores."""
AUDIT_LOG = Path("data/reports/decisions.jsonl")
"""The audit log of decisions, approvals, promotions and rollbacks."""


def _named_in(folder: str, suffix: str = "") -> Callable[[str], Path]:
    """A function from a name to the path of its artefact in a folder."""
    return lambda name: Path(folder) / f"{name}{suffix}"


cases = _named_in("data/cases")
"""Folder of a data set: `cases.jsonl` and its manifest."""
data_proof = _named_in("data/reports/data", ".json")
"""Proof that a data set passed validation; exists only on success."""
data_docs = _named_in("data/docs")
"""The findings of a data set's validation as a page. The proof holds the same, so git and DVC ignore the page."""
probe_proof = _named_in("data/reports/probe", ".json")
"""Proof that a version's stream and reward passed the probe; exists only on success."""
base = _named_in("data/bases")
"""The embedded base of a task, or the pinned reference to its hub checkpoint."""
adapter = _named_in("data/adapters")
"""A version's adapter; `<task>-base` is the adapter that changes nothing."""
graded = _named_in("data/graded")
"""Graded exam transcripts of a version: one JSONL file per mode."""
report = _named_in("data/reports")
"""Folder of a version's reports: `<mode>.json`, `summary.json`, curves and plots."""
mined = _named_in("data/mined")
"""A version's graded answers to its mine data: one JSONL file per mode."""
resit = _named_in("data/resits")
"""A champion's graded answers to a fresh exam besides its own: one JSONL file per mode."""
mine_report = _named_in("data/reports/mine", ".json")
"""A version's error analysis; the page and the plot lie beside it."""
draft = _named_in("data/reports/drafts", ".json")
"""The origin of a drafted version, and its outcome."""
external_report = _named_in("data/reports/external", ".json")
"""A version's external exam; the page lies beside it."""
protocol_report = _named_in("data/reports/protocol", ".json")
"""The published protocol and the sampled exam of a version or a base; the page lies beside it."""
comparison_report = _named_in("data/reports/comparisons", ".json")
"""A comparison of recipes over seeds; the page and the plot lie beside it."""
comparison_pages = _named_in("data/reports/comparisons")
"""Folder of the full tables of a comparison, `tables.md`, to which its page links."""
preregistration = _named_in("data/preregistrations", ".json")
"""The pre-registration of a comparison, written before its runs; in git, and never rewritten."""
merged = _named_in("data/merged")
"""A merge: a full model that needs no PEFT, or a blended adapter."""
attestations = _named_in("data/attestations")
"""Signed statements of others that they rebuilt a version or a merge; in git, one file per key."""
dossier = _named_in("data/dossiers")
"""The dossier of a version: Markdown, one HTML page, and every number with its source. Git and DVC ignore it."""
engine = _named_in(".clinrl/engines", ".json")
"""The address and the key of the vLLM server of a task's base on this machine; private."""
engine_adapters = _named_in(".clinrl/engines")
"""The copies of adapters that the vLLM server of a task's base reads."""
retraining_report = _named_in("data/reports/retraining", ".json")
"""The results of a task's simulated retraining; the page lies beside it."""
watched = _named_in(".clinrl/watched", ".sqlite")
"""The counts of a registered model's requests and answers; private."""


def exam_record(task: str, name: str) -> Path:
    """The record of an exam of a version, a merge or a base. A comparison depends on the folder of its task."""
    return Path("data/reports/exams") / task / f"{name}.json"


def checkpoints(version: str, key: str) -> Path:
    """Scratch for a training run, outside DVC's outputs, keyed by everything that determines the run."""
    return Path(".clinrl/checkpoints") / f"{version}-{key[:16]}"


def journal(name: str, key: str) -> Path:
    """A model's answers so far in a running exam; private, keyed by everything that determines the answers."""
    return Path(".clinrl/exams") / f"{name}-{key[:16]}"


def champions_answers(digest: str) -> Path:
    """The graded answers of a champion, by the identity of its adapter, for comparison with later candidates."""
    return CHAMPIONS / digest[:32]
