"""The people of the year, scripted: who proposes drafts, approves, merges branches and brings a champion back."""

import os
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import httpx
import world
from world import Draft

import laid
from clinrl import artifacts, paths
from clinrl.config.files import read_files, write_whole
from clinrl.config.params import load_params
from clinrl.pipeline import propose
from clinrl.pipeline.propose import DRAFTS
from clinrl.provenance import dvc_yaml
from clinrl.registry import versions
from clinrl.release import audit_log, promotion
from clinrl.signing import approval, keys
from clinrl.signing.keys import Signer

ADA, GRACE = "Ada Lovelace", "Grace Hopper"
"""Who approves releases, with a key of her own; and who approved rollbacks beforehand, with this machine's."""
BRANCH = "built/retrain-esi"
CLONE = Path(".clinrl/clones/retrain-esi-1")


def signer_in(folder: Path) -> Signer:
    """The key that lies in a folder, made at the first call."""
    folder.mkdir(mode=0o700, exist_ok=True)
    with chdir(folder):
        return keys.signer("embedded")


def git(*words: str) -> str:
    """What git says, as a person of the hospital."""
    who = ("-c", "user.name=Ada", "-c", "user.email=ada@localhost")
    return subprocess.run(["git", *who, *words], check=True, capture_output=True, text=True).stdout.strip()


def commit(message: str) -> None:
    """Commit whatever changed, if anything did."""
    git("add", "--all")
    if git("status", "--porcelain"):
        git("commit", "--quiet", "--message", message)


def dvc(*words: str) -> None:
    """Have DVC work in the checkout."""
    env = os.environ | {"PYTHONPATH": str(Path("src").absolute())}
    subprocess.run([sys.executable, "-m", "clinrl.runtime.dvc_command", *words, "--quiet"], check=True, env=env)


def propose_draft(draft: Draft) -> None:
    """Write a draft as `clinrl draft` does, with blocks of one's own, and commit it. Its parent's errors are mined."""
    params = load_params()
    if not paths.mined(draft.parent).exists():
        data = params.data_stages(params.mining[draft.parent].data)
        dvc("repro", "--single-item", *data, f"mine@{draft.parent}")
    report = propose.read_report(params, draft.parent)
    version = {"task": "esi", "parent": draft.parent, "data": f"{draft.name}-data", "exam": "x1"}
    record = propose.Draft(
        name=draft.name, task="esi", parent=draft.parent, parent_digest=report.adapter_digest,
        mining_digest=artifacts.digest(report.model_dump(mode="json")), lever="by hand", targets=(),
        drafts_on_exam=1 + len(propose.records()), dataset=dict(draft.dataset), profile=dict(draft.profile),
        version=version | {"profile": draft.name, "seed": draft.week, "why": f"{draft.says}."},
    )  # fmt: skip
    written = dict(read_files(propose.PARAMS).get(DRAFTS, {}))
    for section, entry in propose.entries(record, params).items():
        written[section] = {**written.get(section, {}), **entry}
    write_whole(DRAFTS, written)
    load_params()
    artifacts.write_json(paths.draft(draft.name), record.model_dump(mode="json"))
    commit(f"{draft.name}: {draft.says}")


def merge() -> bool:
    """Take over what a scheduled run made, if it made anything; whether it did."""
    if not git("branch", "--list", BRANCH) or not git("rev-list", f"HEAD..{BRANCH}"):
        return False
    git("merge", "--quiet", "--no-edit", BRANCH)
    params = load_params()
    names = [name for name in params.versions if paths.exam_record("esi", name).exists()]
    dvc("checkout", "--with-deps", *(f"{stage}@{name}" for name in names for stage in ("evaluate", "mine")
                                     if stage == "evaluate" or paths.mine_report(name).exists()))  # fmt: skip
    return True


def objects() -> bytes:
    """Everything that git holds, whoever reaches it."""
    return subprocess.run(["git", "cat-file", "--batch", "--batch-all-objects"], check=True, capture_output=True).stdout


def paused(api: str, login: str) -> str:
    """The id of the run that waits for a person; empty if none does."""
    user, _, password = login.partition(":")
    asked = {"flow_runs": {"state": {"type": {"any_": ["PAUSED"]}}}}
    with httpx.Client(base_url=api, auth=(user, password), timeout=300, trust_env=False) as client:
        token = client.get("/csrf-token", params={"client": "people"}).raise_for_status().json()["token"]
        seen = {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": "people"}
        answer = client.post("/flow_runs/filter", json=asked, headers=seen).raise_for_status()
        return next((str(run["id"]) for run in answer.json()), "")


def approve(run: str, ada: Signer) -> None:
    """Answer the run that waits, as Ada does: she reads the decision, and signs it."""
    from prefect.flow_runs import resume_flow_run

    lines = audit_log.read(CLONE / paths.AUDIT_LOG, keys.keyring())
    decision = next(line.body for line in reversed(lines) if line.kind == "decision")
    signed = approval.token(artifacts.digest(decision), ADA, ada)
    resume_flow_run(run, run_input={"approve": True, "approver": ADA, "token": signed, "note": "as the gate says"})


def bring_back() -> None:
    """Undo the last rollback, as Grace does."""
    champion = versions.find("esi", versions.CHAMPION)
    promotion.rollback(load_params(), "esi", approver=GRACE, of=champion.digest)


def write_project(root: Path, folder: Path, ada: Signer, *, is_toy: bool) -> None:
    """The hospital's checkout: the code and the base of this one, parameters of its own, nothing built but the base."""
    for part in ("src", ".dvc", "data/bases/esi", "data/adapters/esi-base"):
        away = shutil.ignore_patterns("__pycache__", "*.egg-info", "cache", "tmp", "config.local")
        shutil.copytree(root / part, folder / part, ignore=away)
    kept = ".clinrl/dvc/repo/.gitignore"  # where git keeps no such folder, DVC makes one that everybody can write in
    (folder / kept).parent.mkdir(parents=True)
    for file in ("dvc.yaml", ".gitignore", ".dvcignore", kept):
        shutil.copyfile(root / file, folder / file)
    base = read_files(root / "params.yaml")[root / "params/esi.yaml"]["bases"]["esi"]
    whole = world.sections({ADA: ada.key.line, GRACE: signer_in(folder).key.line}, base)
    laid.lay(folder, world.toy(whole) if is_toy else whole)
    with chdir(folder):
        git("init", "--quiet", "--initial-branch", "main")
        git("add", "--force", kept)
        dvc_yaml.prove(Path("params.yaml"))
        dvc("commit", "--force", "params", "base@esi")
        commit("begun")
