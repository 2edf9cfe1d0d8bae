"""Whatever opens a checkpoint or a table is told to run none of its code: every call in the sources is looked at."""

import ast
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import dolls
from clinrl.errors import ArtefactError
from clinrl.models import bases

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "flows").rglob("*.py")])
READERS = {"from_pretrained", "from_config"}
"""Methods that open a checkpoint, of whatever class."""
LOADERS = {"SentenceTransformer", "CrossEncoder", "LLM", "load_dataset", "pipeline"}
"""What opens one when it is called, or a data set that may bring a script along."""
NEVER_CODE = {"PeftModel", "GenerationConfig"}
"""Open an adapter, and settings: neither has code that it could run."""
UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "diskcache"}


def calls(nodes: list[ast.AST]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """The calls that may open something: what each is called on, its name and its keywords as they are written."""
    for node in nodes:
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in READERS | LOADERS | {"load"}:
                on = ast.unparse(node.func).rpartition(".")[0]
                yield on, name, {word.arg or "**": ast.unparse(word.value) for word in node.keywords}


def parsed(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def careless(nodes: list[ast.AST]) -> list[str]:
    """The calls of a source that may run code of what they open."""
    found = []
    for on, name, words in calls(nodes):
        opens = (name in READERS and on not in NEVER_CODE) or name in LOADERS
        if opens and words.get("trust_remote_code") != "False":
            found.append(f"{on}.{name} without trust_remote_code=False")
        if name == "from_pretrained" and on.startswith("AutoModel") and words.get("use_safetensors") != "True":
            found.append(f"{on}.{name} without use_safetensors=True")
        if (on, name) == ("torch", "load") and words.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if name == "load" and "allow_pickle" in words:
            found.append(f"{on}.load with allow_pickle")
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"import of {name}" for name in names if name.split(".")[0] in UNPICKLING]
    return found


def test_no_source_opens_anything_carelessly() -> None:
    opened = 0
    for path in SOURCES:
        nodes = parsed(path.read_text(encoding="utf-8"))
        assert careless(nodes) == [], path
        opened += sum(name in READERS | LOADERS for _, name, _ in calls(nodes))
    assert opened >= 10  # what is looked for is there


@pytest.mark.parametrize(
    "line",
    [
        "AutoTokenizer.from_pretrained(folder)",
        "AutoTokenizer.from_pretrained(folder, trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(folder, **words)",
        "transformers.AutoConfig.from_pretrained(folder)",
        "AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)",
        "SentenceTransformer(folder)",
        "datasets.load_dataset(name)",
        "torch.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "import pickle",
        "from joblib import load",
    ],
)
def test_careless_calls_are_found(line: str) -> None:
    assert len(careless(parsed(line))) == 1


def test_a_checkpoint_that_brings_code_is_refused_and_its_code_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a terminal transformers would ask whether it may run it."""
    shutil.copytree(dolls.built() / "data/bases/esi", tmp_path / "own")
    ran = tmp_path / "ran"
    config = json.loads((tmp_path / "own/config.json").read_text())
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    changed = {**config, "model_type": "homemade", "auto_map": classes}
    (tmp_path / "own/config.json").write_text(json.dumps(changed))
    (tmp_path / "own/own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    with pytest.raises(ArtefactError, match="needs custom code of its own, which is never run"):
        bases._open(tmp_path / "own", {}, tmp_path / "own")
    assert not ran.exists()
