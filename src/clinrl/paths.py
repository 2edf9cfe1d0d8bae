"""Where each artefact of each name lives, relative to the project root. Nothing else knows.

The project root is the working directory; every command starts there, as DVC does.
"""

from pathlib import Path

LIVE_FILE = "live.jsonl"
"""Of a training that goes on: its history as far as it goes, for those who follow it."""
TRAINING_FILE = "training.json"
"""Of a training that goes on: its task, version and recipe, for those who follow it."""
CASES_FILE = "cases.jsonl"
REFUSED_FILE = "refused.tsv"
IMPORT_FILE = "import.json"


def cases(data: str) -> Path:
    """Folder of a data set: `cases.jsonl` and its manifest."""
    return Path("data/cases") / data


def import_record(data: str) -> Path:
    """What became of the rows of an import's source, in counts. Only an imported data set has one."""
    return cases(data) / IMPORT_FILE


def params_proof() -> Path:
    """Proof that params.yaml was checked: a constant, which every stage depends on."""
    return Path("data/reports/params.json")


def data_proof(data: str) -> Path:
    """Proof that a data set passed validation; exists only on success."""
    return Path("data/reports/data") / f"{data}.json"


def data_docs(data: str) -> Path:
    """Great Expectations' pages for a data set (they hold run times, so git and DVC ignore them)."""
    return Path("data/docs") / data


def probe_proof(version: str) -> Path:
    """Proof that a version's stream and reward passed the probe; exists only on success."""
    return Path("data/reports/probe") / f"{version}.json"


def base(task: str) -> Path:
    """The embedded base of a task, or the pinned reference to its hub checkpoint."""
    return Path("data/bases") / task


def adapter(version: str) -> Path:
    """A version's adapter; `<task>-base` is the adapter that changes nothing."""
    return Path("data/adapters") / version


def graded(version: str) -> Path:
    """Graded exam transcripts of a version: one JSONL a mode."""
    return Path("data/graded") / version


def report(version: str) -> Path:
    """Folder of a version's reports: `<mode>.json`, `summary.json`, curves and plots."""
    return Path("data/reports") / version


def exam_record(task: str, name: str) -> Path:
    """What an exam of a version, a merge or a base left, by digest; a comparison depends on the folder of its task."""
    return Path("data/reports/exams") / task / f"{name}.json"


def mined(version: str) -> Path:
    """A version's graded answers to its mine data: one JSONL a mode."""
    return Path("data/mined") / version


def mine_report(version: str) -> Path:
    """Where a version errs; the page and the plot lie beside it."""
    return Path("data/reports/mine") / f"{version}.json"


def draft(version: str) -> Path:
    """From what a version was drafted, and what became of it."""
    return Path("data/reports/drafts") / f"{version}.json"


def external_report(version: str) -> Path:
    """A version's external exam; the page lies beside it."""
    return Path("data/reports/external") / f"{version}.json"


def protocol_report(name: str) -> Path:
    """The published protocol and the sampled exam of a version or a base; the page lies beside it."""
    return Path("data/reports/protocol") / f"{name}.json"


def comparison_report(name: str) -> Path:
    """A comparison of recipes over seeds; the page and the plot lie beside it."""
    return Path("data/reports/comparisons") / f"{name}.json"


def comparison_pages(name: str) -> Path:
    """The full tables of a comparison, `tables.md`, to which its page leads."""
    return Path("data/reports/comparisons") / name


def preregistration(name: str) -> Path:
    """What was written down before the runs of a comparison; in git, and never written again."""
    return Path("data/preregistrations") / f"{name}.json"


def retraining_report() -> Path:
    """What simulated lives of retraining came to; its page beside it."""
    return Path("data/reports/retraining.json")


def checkpoints(version: str, key: str) -> Path:
    """Scratch for a training run, outside DVC's outputs, keyed by everything that determines the run."""
    return Path(".clinrl/checkpoints") / f"{version}-{key[:16]}"


def journal(name: str, key: str) -> Path:
    """What a model has answered of an exam that goes on, private, keyed by everything that determines the answers."""
    return Path(".clinrl/exams") / f"{name}-{key[:16]}"


def engine(task: str) -> Path:
    """Where the vLLM server of a task's base listens on this machine, and its key; private."""
    return Path(".clinrl/engines") / f"{task}.json"


def merged(name: str) -> Path:
    """A merge: a full model that needs no PEFT, or a blended adapter."""
    return Path("data/merged") / name


def champions_answers(digest: str) -> Path:
    """The graded answers of a champion, by the identity of its adapter, for comparison with whoever comes next."""
    return Path(".clinrl/champions") / digest[:32]


def locks() -> Path:
    """Folder of the locks of what one process at a time may do here."""
    return Path(".clinrl/locks")


def attestations(name: str) -> Path:
    """Signed statements of others that they rebuilt a version or a merge; in git, one file a key."""
    return Path("data/attestations") / name


def dossier(version: str) -> Path:
    """The papers of a version: Markdown, one HTML page, and every number with its source. Git and DVC ignore them."""
    return Path("data/dossiers") / version


def audit_log() -> Path:
    """The audit file of decisions, approvals, promotions and rollbacks."""
    return Path("data/reports/decisions.jsonl")
