"""Push a version or a merge to a Hugging Face hub: weights, tokenizer and card, but no case and no answer.

The files are compared with dvc.lock first; afterwards the weights on the hub are compared with those that were sent.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from clinrl import paths
from clinrl.artifacts import MANIFEST, identity, read_manifest, sha256_file
from clinrl.config.machine import LOOPBACK
from clinrl.errors import ArtefactError, DataError, ParamsError, Refused, echo, mask
from clinrl.models import bases
from clinrl.models.hub import CONFIGS, TOKENIZER
from clinrl.provenance import pins
from clinrl.registry.log_run import Recorded, collect
from clinrl.reports.render import render

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from clinrl.config.params import Params

CARD: Final = "README.md"
SENT: Final = ("adapter_config.json", "history.jsonl", "merge.json", MANIFEST, *CONFIGS, *TOKENIZER)
"""Files that are sent with the weights. Others, such as verdicts of judges, quote a model's text about a case."""
BASE: Final = "base"
TERMS: Final = ("LICENSE", "NOTICE")
"""The project's own, for a model that is made of nothing else. A repository keeps those that a person gave it."""


def stage(params: "Params", name: str, *, repo: str, endpoint: str | None = None, public: bool = False) -> None:
    """Push a version or a merge with its card to a repository, private unless `public`; print its address.

    Raises ParamsError for an invalid repository or endpoint; ArtefactError as `collect` does, or if the
    hub holds other weights afterwards; DataError as `card_of` does; Refused without a token, or if the hub refuses.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, and in no __all__

    try:
        validate_repo_id(repo)
    except HFValidationError:
        repo = ""
    if repo.count("/") != 1:
        raise ParamsError("--repo must be OWNER/NAME of letters, digits, '-', '_' and '.'")
    endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
    try:
        address = urlsplit(endpoint)
    except ValueError:  # a bracket that is not closed
        address = urlsplit("")
    if not address.hostname or not (address.scheme == "https" or address.hostname in LOOPBACK):
        raise ParamsError(f"{mask(endpoint)!r} is no endpoint such as https://huggingface.co: a token is sent to it")
    model = params.model(name)
    if not get_token():
        raise Refused("the hub wants a token; set HF_TOKEN to one that may write, or run `hf auth login`")
    made = collect(params, model)
    files = {file: made.model.folder / file for file in _chosen(made.model.folder)}
    base = paths.base(model.task.name)
    named = bases.reference(base)
    terms = {} if named else {file: pins.ROOT / file for file in TERMS if (pins.ROOT / file).exists()}
    if named.get("commit", "").startswith("local-"):  # no hub has it, and its path is this machine's alone
        if made.is_adapter:
            raise Refused(f"{name} is an adapter above {named['repo']}, a folder of this machine; push a fold of it")
        named = {**named, "repo": ""}
    if made.is_adapter and not named:  # no hub has the embedded base
        files |= {f"{BASE}/{file}": base / file for file in _chosen(base)}
    api = HfApi(endpoint=endpoint)
    with _refused(repo, endpoint):
        card = card_of(made, repo, named or {"repo": repo})
        commit, count = _send(api, repo, files, terms, card, public=public)
    print(f"{endpoint}/{repo}/tree/{commit}")
    echo(f"{count} files, {'public' if public else 'private'}; digest {made.digest}")


def _chosen(folder: Path) -> list[str]:
    """The files of a folder that are sent: safetensors, and the files that are needed to load them."""
    names = [MANIFEST, *read_manifest(folder).files]
    return [name for name in names if "/" not in name and _is_ours(name)]


def _is_ours(name: str) -> bool:
    """Whether a file of a repository is one of those that are sent."""
    file = name.removeprefix(f"{BASE}/")
    return "/" not in file and (file in SENT or ".safetensors" in Path(file).suffixes)


def card_of(made: Recorded, repo: str, base: Mapping[str, Any]) -> str:
    """The card for a repository: the registry's card, with the base's repository and the code that loads the model.

    `base` has its repository (empty: one that no hub has), and of a hub's its commit and quantisation. Raises
    ArtefactError if there is no card, and DataError for a model that was trained on imported records.
    """
    from huggingface_hub import ModelCard

    if not made.card:
        raise ArtefactError(f"{made.model.folder} has no {CARD}; restore the folder with `dvc checkout`")
    if any(one.is_imported for one in made.training):
        raise DataError(f"{made.model.name} learned from somebody's records and may repeat them; nothing was pushed")
    card = ModelCard(made.card)
    data: Any = card.data
    is_embedded = base["repo"] == repo
    named = None if is_embedded and not made.is_adapter else base["repo"]  # an adapter is sent with the embedded base
    data.base_model, data.base_model_relation = named or None, "adapter" if made.is_adapter else "merge"
    blocks = [repr(block) for block in bases.think_blocks(made.model.folder)]
    card.text += "\n" + render(
        "hub_card", name=made.model.name, repo=repo, base=base["repo"], is_adapter=made.is_adapter, digest=made.digest,
        base_digest=identity(made.base), base_name=f"{made.model.task.name}-base",
        subfolder=BASE if is_embedded else "", blocks=blocks,
        commit=base.get("commit", ""), quantized=base.get("quantize") == "nf4" or bool(made.manifest.spec.get("qlora")),
        reader="PreTrainedTokenizerFast" if is_embedded else "AutoTokenizer",
    )  # fmt: skip
    return str(card)


def _send(
    api: "HfApi", repo: str, files: Mapping[str, Path], terms: Mapping[str, Path], card: str, *, public: bool
) -> tuple[str, int]:
    """Make the repository if needed, send the files as one commit, compare the hub's weights.

    `terms` are sent where the repository has none. Returns the commit, and how many files were sent.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.hf_api import RepoFile

    api.create_repo(repo, private=not public, exist_ok=True)
    is_private = api.model_info(repo).private
    if is_private is public:  # an existing repository keeps its visibility
        what, do = ("private", "leave out --public") if public else ("public", "give --public too")
        raise Refused(f"{repo} is there and is {what}; {do}, or another --repo: nothing was sent")
    held = api.list_repo_files(repo)
    lacking = {name: path for name, path in terms.items() if not {name, f"{name}.txt"} & {*held}}
    add = [CommitOperationAdd(name, str(path)) for name, path in (*files.items(), *lacking.items())]
    add.append(CommitOperationAdd(CARD, card.encode()))
    # Of a model that was pushed before; beside a full model, an old adapter_config.json would be loaded in its place.
    kept = (*files, "LICENSE", "LICENSE.txt", "NOTICE")  # a person may have added these
    others = [name for name in sorted(held) if name not in kept and _is_ours(name)]
    changes: list[Any] = [*add, *map(CommitOperationDelete, others)]
    done = api.create_commit(repo, changes, commit_message="clinrl push")
    expected = {name: sha256_file(path) for name, path in files.items() if name.endswith(".safetensors")}
    sent = api.get_paths_info(repo, list(expected), revision=done.oid)
    found = {one.path: one.lfs.sha256 for one in sent if isinstance(one, RepoFile) and one.lfs}
    if found != expected:
        raise ArtefactError(f"{repo} holds other weights than were sent; delete the repository, then push again")
    return str(done.oid), len(add)


@contextmanager
def _refused(repo: str, endpoint: str) -> Iterator[None]:
    """Turn every error of the hub's library in this block into Refused, in one sentence without a token."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Refused:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        why = {
            401: "does not know the token; set HF_TOKEN to a valid one",
            403: f"does not let this token write {repo}; use one that may",
            404: f"has no {repo} that this token may write",
            409: f"has another change of {repo} in progress; push again",
        }.get(status, "failed; try later")
        raise Refused(f"{mask(endpoint)} {why} ({status})") from error
    except Exception as error:  # from httpx, from Xet, or for a malformed answer
        raise Refused(
            f"{mask(endpoint)} did not take {repo} ({type(error).__name__}); check address and network"
        ) from error
