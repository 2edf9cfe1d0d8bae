"""Checkpoints of the Hugging Face hub: the commit behind a revision, and the files of a commit.

A commit that is in the local cache needs no network. Whatever goes wrong is told in one sentence that says what to do.
"""

import errno
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from re import compile as pattern

from clinrl.errors import Refused

COMMIT = pattern(r"[0-9a-f]{40}")
"""A commit of the hub. A branch or a tag may be moved by whoever owns the repository."""
CONFIGS = (
    "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "LICENSE", "LICENSE.txt", "NOTICE",
)  # fmt: skip
"""Files beside the weights that a full model takes from its base."""
TOKENIZER = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "special_tokens_map.json",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
"""Files of a tokenizer, which come from the adapter if it has one."""
WANTED = ("model*.safetensors", "model*.safetensors.index.json", *CONFIGS, *TOKENIZER)
ENCODER = (
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "*/config.json",
    "*/model.safetensors",
)  # fmt: skip
"""Files of a sentence encoder beside those of its language model."""
FULL = (errno.ENOSPC, errno.EDQUOT)
KEPT = "start the same command again: what was fetched is kept"


def commit_of(repo: str, revision: str) -> str:
    """The commit behind a revision. One that the cache has is not asked for. Raises Refused if the hub names none."""
    from huggingface_hub import HfApi, constants

    if COMMIT.fullmatch(revision) and revision in _cached(repo):
        return revision
    with _refused(repo, revision):
        commit = HfApi().model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha
    if commit is None:
        raise Refused(f"the hub knows {repo}@{revision} but names no commit for it; set `revision` to a commit")
    return commit


def fetch(repo: str, commit: str, also: Sequence[str] = ()) -> Path:
    """The folder with a checkpoint's files, and those that `also` names: from the cache if all are there, else from the
    hub.

    Raises Refused if the hub does not deliver them, if they are not what it announced, or if no safetensors are among
    them.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = [*WANTED, *also]
    try:
        folder = Path(snapshot_download(repo, revision=commit, allow_patterns=wanted, local_files_only=True))
    except LocalEntryNotFoundError:
        folder = None
    if folder is None or not any(folder.glob("model*.safetensors")):  # a cache may hold a configuration alone
        with _refused(repo, commit):
            folder = Path(snapshot_download(repo, revision=commit, allow_patterns=wanted))
        _check(repo, folder)
    return folder


def _check(repo: str, folder: Path) -> None:
    """Refuse files that were just fetched and are not those of the commit. The hub calls weights by their SHA-256."""
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        raise Refused(f"{repo} holds no model*.safetensors, and other weights are never opened; choose one that does")
    for file in weights:
        blob = file.resolve()
        if len(blob.name) == hashlib.sha256().digest_size * 2:
            with blob.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != blob.name:
                blob.unlink()
                file.unlink()
                raise Refused(f"{file.name} of {repo} is not what the hub announced, and was removed; {KEPT}")


def _cached(repo: str) -> list[str]:
    """The commits of which the cache has files."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "snapshots"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@contextmanager
def _refused(repo: str, revision: str) -> Iterator[None]:
    """Raise Refused, in one sentence, for whatever the hub's library raises in this block."""
    from httpx2 import HTTPError  # what huggingface_hub asks with
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        yield
    except (HTTPError, OfflineModeIsEnabled, OSError, ValueError) as error:
        # The library says of a cache that has not all files why it could not ask the hub.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        raise Refused(_sentence(cause, repo, revision)) from error


def _sentence(error: BaseException, repo: str, revision: str) -> str:
    """What happened, and what to do."""
    from huggingface_hub import constants, errors, get_token

    name, token = f"{repo}@{revision[:12] if COMMIT.fullmatch(revision) else revision}", get_token()
    page = f"{constants.ENDPOINT}/{repo}"
    if isinstance(error, errors.OfflineModeIsEnabled | FileNotFoundError):
        has = ", ".join(_cached(repo)) or "none"
        if revision in has:
            return f"the cache has a part of {name} only, and HF_HUB_OFFLINE forbids to fetch the rest; unset it once"
        return (
            f"{name} is not in the cache, and HF_HUB_OFFLINE forbids to ask the hub; set `revision` to a commit that "
            f"the cache has ({has}), or unset HF_HUB_OFFLINE"
        )
    if isinstance(error, errors.GatedRepoError):
        if token:
            return f"{repo} is gated for the account of HF_TOKEN; accept its licence on {page}, then {KEPT}"
        return f"{repo} is gated; accept its licence on {page}, set HF_TOKEN to a token of that account, then {KEPT}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision}; {page}/commits/main lists its commits"
    if isinstance(error, errors.DisabledRepoError):
        return f"the hub has disabled {repo}, so nobody can fetch it; choose another checkpoint"
    if isinstance(error, errors.HfHubHTTPError):
        return _answered(error, repo, name)
    if isinstance(error, OSError) and error.errno in FULL:
        return f"no space is left for {name} in {constants.HF_HUB_CACHE}; free some or set HF_HUB_CACHE, then {KEPT}"
    if isinstance(error, PermissionError):
        return f"{error.filename or constants.HF_HUB_CACHE} may not be written; set HF_HUB_CACHE to a folder that may"
    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is no name of a repository of the hub, such as Qwen/Qwen3.5-9B; correct it in params.yaml"
    kind = type(error).__name__
    if "Proxy" in kind:
        return f"the proxy did not let {name} through ({kind}); check HTTPS_PROXY"
    if "Timeout" in kind:
        return f"the hub did not answer in time about {name} ({kind}); {KEPT}"
    if "Connect" in kind:
        return (
            f"the hub cannot be reached for {name} ({kind}); check the network, or set `revision` to a commit that the "
            f"cache has ({', '.join(_cached(repo)) or 'none'})"
        )
    return f"the hub did not deliver {name} whole ({kind}); check the network and the disk, then {KEPT}"


def _answered(error: BaseException, repo: str, name: str) -> str:
    """What an error that the hub answered with means."""
    from huggingface_hub import errors, get_token

    assert isinstance(error, errors.HfHubHTTPError)
    status = error.response.status_code
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        reader = "the account of HF_TOKEN" if get_token() else "whoever has no HF_TOKEN"
        return f"the hub has no {repo}, or hides it from {reader}; check its name in params.yaml"
    if status in (401, 403):
        return f"the hub refuses HF_TOKEN for {repo} ({status}); set HF_TOKEN to a valid token that may read it"
    if status == 429:
        return f"the hub has had too many requests ({status}); wait some minutes, set HF_TOKEN for more, then {KEPT}"
    return f"the hub failed at {name} ({status}); try later, and {KEPT}"
