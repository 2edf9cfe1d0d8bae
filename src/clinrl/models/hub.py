"""Checkpoints of the Hugging Face hub: the commit behind a revision, and the files of a commit.

A commit that is in the local cache needs no network. Every failure becomes one sentence that says what to do.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from re import compile as pattern

from clinrl.artifacts import sha256_file
from clinrl.errors import NO_ROOM, Refused, file_of, mask, number_of

COMMIT = pattern(r"[0-9a-f]{40}")
"""A commit of the hub. A branch or a tag is no pin: the repository's owner can move it."""
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
VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.txt", "merges.txt")
"""Those with the tokens themselves: a checkpoint has one of them. `vocab.json` is of no use without `merges.txt`."""
WANTED = ["model*.safetensors", "model*.safetensors.index.json", *CONFIGS, *TOKENIZER]
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)
KEPT = "start the same command again: what was fetched is kept"


def commit_of(repo: str, revision: str) -> str:
    """The commit behind a revision; for a cached commit no hub is asked. Raises Refused if the hub names none."""
    from huggingface_hub import HfApi, constants

    with _refused(repo, revision):
        if COMMIT.fullmatch(revision) and revision in _cached(repo):
            return revision
        commit = HfApi().model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha
    if commit is None:
        raise Refused(f"the hub knows {repo}@{revision} but names no commit for it; set `revision` to a commit")
    return commit


def fetch(repo: str, commit: str) -> Path:
    """The folder with a checkpoint's files: from the cache if all are there, else from the hub.

    Raises Refused if the hub does not deliver them, if they are not what it announced, or if no safetensors are among
    them.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _refused(repo, commit):
        try:
            folder = Path(snapshot_download(repo, revision=commit, allow_patterns=WANTED, local_files_only=True))
            if _is_whole(folder):
                return _checked(repo, folder)
            _mark(folder).unlink(missing_ok=True)  # what is fetched anew is compared anew
        except LocalEntryNotFoundError:
            pass
        # Fail if the hub cannot be reached: the download is silent about that where the cache has a part of the commit.
        next(iter(HfApi().list_repo_tree(repo, revision=commit)), None)
        folder = Path(snapshot_download(repo, revision=commit, allow_patterns=WANTED))
    return _checked(repo, folder)


def cached_config(repo: str, revision: str) -> Path | None:
    """The config.json of a checkpoint in a local folder or in the hub's cache, without a request to the hub."""
    from huggingface_hub import try_to_load_from_cache

    if Path(repo).is_absolute():
        path = Path(repo) / "config.json"
        return path if path.is_file() else None
    found = try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(found) if isinstance(found, str) else None


def _is_whole(folder: Path) -> bool:
    """Whether a folder has a tokenizer, weights and each part that an index names: not every cache lists the files of
    a commit."""
    held = {file.name for file in folder.glob("model*.safetensors") if file.is_file()}
    try:
        indices = [json.loads(index.read_bytes()) for index in folder.glob("model*.safetensors.index.json")]
        parts = [index["weight_map"].values() for index in indices]
        return bool(held) and has_tokenizer(folder) and all(map(held.issuperset, parts))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has the tokens of a tokenizer. Without them transformers makes up an empty one."""
    return any((folder / name).is_file() for name in VOCABULARY)


def _checked(repo: str, folder: Path) -> Path:
    """The folder of a commit, whose weights are compared once: a kill may have come before that."""
    if not _mark(folder).exists() and os.access(folder.parent.parent, os.W_OK):  # others look after a cache to read
        _check(repo, folder)
        _mark(folder).touch()
    return folder


def _mark(folder: Path) -> Path:
    return folder.parent.parent / f"{folder.name}.checked-by-clinrl"


def _check(repo: str, folder: Path) -> None:
    """Refuse fetched files that are not those of the commit. The cache names weights by the hub's SHA-256 of them."""
    weights = sorted(folder.glob("model*.safetensors"))
    if not weights:
        raise Refused(f"{repo} holds no model*.safetensors, and other weights are never opened; choose one that does")
    for file in weights:
        blob = file.parent / file.readlink() if file.is_symlink() else file  # a link itself if repositories share it
        if len(blob.name) == 64 and sha256_file(blob) != blob.name:
            for one in (file.resolve(), blob, file):
                one.unlink(missing_ok=True)
            raise Refused(f"{file.name} of {repo} is not what the hub announced, and was removed; {KEPT}")


def _cached(repo: str) -> list[str]:
    """The commits that have files in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "snapshots"
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:  # there is no cache, or it cannot be read
        return []


@contextmanager
def _refused(repo: str, revision: str) -> Iterator[None]:
    """Turn every error of the hub's library in this block into Refused with one sentence."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:  # from httpx2, Xet (a RuntimeError), the cache, or a page that is no answer
        # If the cache lacks files, the cause is the reason why the library could not ask the hub.
        cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        raise Refused(_sentence(cause, repo, revision)) from error


def _sentence(error: BaseException, repo: str, revision: str) -> str:
    """What failed and what to do about it: the sentence of the first rule that applies."""
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is not the name of a hub repository, such as Qwen/Qwen3.5-9B; correct it in params.yaml"
    name, token = f"{repo}@{revision[:12] if COMMIT.fullmatch(revision) else revision}", get_token()
    asker = "HF_TOKEN" if token else "requests without HF_TOKEN"
    page, cached, kind = f"{mask(constants.ENDPOINT)}/{repo}", _cached(repo), type(error).__name__
    instead = f"set `revision` to a commit that the cache has ({', '.join(cached) or 'none'})"
    is_offline = isinstance(error, errors.OfflineModeIsEnabled)
    is_gated = isinstance(error, errors.GatedRepoError)
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    number = number_of(error)
    certificates = Path(os.environ.get("SSL_CERT_FILE", os.devnull))
    rules = (
        (is_offline and revision in cached,
         f"the cache has only a part of {name}, and HF_HUB_OFFLINE forbids fetching the rest; unset it once"),
        (is_offline,
         f"{name} is not in the cache, and HF_HUB_OFFLINE forbids asking the hub; {instead}, or unset HF_HUB_OFFLINE"),
        (is_gated and token,
         f"{repo} is gated for the account of HF_TOKEN; accept its licence on {page}, then {KEPT}"),
        (is_gated,
         f"{repo} is gated; accept its licence on {page}, set HF_TOKEN to a token of that account, then {KEPT}"),
        (isinstance(error, errors.RevisionNotFoundError),
         f"{repo} has no revision {revision}; {page}/commits/main lists its commits"),
        (isinstance(error, errors.DisabledRepoError),
         f"the hub has disabled {repo}, so nobody can fetch it; choose another checkpoint"),
        (status and isinstance(error, errors.EntryNotFoundError),
         f"the hub lists a file of {name} that it does not have ({status}); try later, or set another `revision`"),
        (isinstance(error, errors.RepositoryNotFoundError) or status == 404,
         f"the hub has no {repo}, or hides it from {'the account of ' if token else ''}{asker}; check its name in "
         "params.yaml"),
        (status in (401, 403),
         f"the hub refuses {asker} for {repo} ({status}); set HF_TOKEN to a valid token that may read it"),
        (status == 407,
         f"the proxy asks for a login ({status}); set HTTPS_PROXY to http://user:password@host:port"),
        (status == 429,
         f"the hub has had too many requests ({status}); wait some minutes, set HF_TOKEN for more, then {KEPT}"),
        (status, f"the hub failed at {name} ({status}); try later, and {KEPT}"),
        (number in NO_ROOM,
         f"no space is left for {name} in {constants.HF_HUB_CACHE}; free some or set HF_HUB_CACHE, then {KEPT}"),
        ("CERTIFICATE" in str(error) or (isinstance(error, FileNotFoundError) and not certificates.exists()),
         f"no root certificate is known for {page}; set SSL_CERT_FILE to a file with those of your network"),
        (number in UNWRITABLE,
         f"{file_of(error) or constants.HF_HUB_CACHE} may not be written; set HF_HUB_CACHE to a folder that may"),
        (kind in ("UnsupportedProtocol", "InvalidURL"),
         "HF_ENDPOINT is no address such as https://huggingface.co; correct it, or unset it"),
        (kind in ("UnicodeEncodeError", "LocalProtocolError"),
         f"HF_TOKEN has a character that no token has ({kind}); copy it again from the hub's settings"),
        ("proxy" in f"{kind} {error}".lower(),
         f"a proxy did not let {name} through ({kind}); check HTTPS_PROXY and ALL_PROXY, such as http://host:port"),
        ("Timeout" in kind, f"the hub did not answer in time about {name} ({kind}); {KEPT}"),
        ("Connect" in kind,
         f"the hub cannot be reached for {name} ({kind}); check the network and HTTPS_PROXY, "
         f"{f'then {KEPT}' if revision in cached else f'or {instead}'}"),
        (True, f"the hub did not deliver {name} whole ({kind}); check the network and the disk, then {KEPT}"),
    )  # fmt: skip
    return next(sentence for applies, sentence in rules if applies)
