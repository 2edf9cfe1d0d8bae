"""Models made of finished versions without training: a version folded into its base, or versions blended.

A fold adds the adapter's change to the weights of the base: a full model that needs no PEFT. A blend is a weighted sum
of the changes of several adapters, as an adapter again (cat, svd) or as a full model (linear, ties, dare). Weights are
processed tensor by tensor, so that memory does not grow with the model. Changes are never added to quantised weights:
an adapter that was trained above a 4-bit copy is added to the checkpoint that the copy was made of.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from clinrl import paths
from clinrl.artifacts import exclusive, read_manifest, seal, staged, write_json, write_text
from clinrl.config.machine import machine_at
from clinrl.config.params import Params
from clinrl.config.schema import Fold
from clinrl.errors import ArtefactError, Refused
from clinrl.merging import lora_delta, safetensors_io
from clinrl.merging.check import Part, check
from clinrl.models import bases, hub, opening
from clinrl.models.chat import render
from clinrl.reports.render import render as render_page
from clinrl.runtime import determinism, gpus
from clinrl.runtime.progress import progress
from clinrl.tasks.base import Task, get_task

Method = Literal["fold", "cat", "svd", "linear", "ties", "dare"]

RESULT = "merge.json"
CASES, SEED = 4, 1
"""The number of cases in the check, each in every mode, and the seed by which the mine pool gives them."""


def stage(params: Params, name: str) -> None:
    """Make the merge `name` and write `data/merged/<name>`, checked against base and adapters.

    Raises ArtefactError if an input is missing, altered or of another base, Refused for an adapter that cannot be
    merged exactly and for a result that differs from base and adapter, and Busy if another command makes it.
    """
    merge = params.merges.all[name]
    task, target = get_task(merge.task), paths.merged(name)
    method: Method = "fold" if isinstance(merge, Fold) else merge.method
    weights = (1.0,) if isinstance(merge, Fold) else merge.weights
    versions = dict(zip(merge.parts.values(), weights, strict=True))
    chosen = merge.model_dump(mode="json", include={"density", "seed"})  # a fold has neither
    parts = [(paths.adapter(version), weight) for version, weight in versions.items()]
    if (gpu := machine_at(params.scale).gpu) is not None:
        gpus.show_one(gpu)  # the check would use the first
    with exclusive(target):
        inputs: dict[str, str] = {}
        for version in versions:
            made = bases.made_of(task, paths.adapter(version))
            inputs |= {"base": made["base"], version: made["adapter"]}
        specs = [read_manifest(paths.adapter(version)).spec for version in versions]
        waivers = [spec.get("waiver", "") for spec in specs]
        in_four_bits = any(spec.get("qlora") for spec in specs)
        determinism.settle(SEED)
        base = paths.base(task.name)
        named = bases.reference(base)
        source = bases.locate(named, base) if named else base
        with staged(target) as out:
            result: dict[str, Any] = {"method": method, "versions": versions}
            error = blend(method, source, parts, out, **chosen)
            if method != "fold":
                result["relative_error"] = None if error is None else round(error, 6)
            prompts = _prompts(params, task, parts[0][0])
            compared = check(source, parts, out, prompts, exact=method in ("fold", "cat", "linear"))
            result["check"] = compared.model_dump(mode="json")
            write_json(out / RESULT, result)
            write_text(out / "README.md", _card(name, task, result, params.records_of(*versions), in_four_bits))
            seal(
                out,
                kind="merged",
                name=name,
                task=task.name,
                task_version=task.version,
                spec={
                    "method": method,
                    "versions": versions,
                    **(chosen if method in ("ties", "dare") else {}),
                    "scale": params.scale,
                    "max_shard_bytes": safetensors_io.MAX_SHARD_BYTES,
                    "environment": determinism.record(),
                    **({"waiver": "; ".join(filter(None, waivers))} if any(waivers) else {}),
                    # As for a version: an adapter is examined and served above the base that its parts learned on.
                    **({"qlora": True} if in_four_bits and method in ("cat", "svd") else {}),
                },
                inputs=inputs,
            )


def blend(
    method: Method, base: Path, parts: Sequence[Part], out: Path, *, density: float = 1.0, seed: int = 0
) -> float | None:
    """Write a blend of adapters of one base into the folder `out`; `parts` are their folders with their weights.

    `config.schema.Blend` describes the methods. A fold adds one adapter, without a weight. A changed weight of a full
    model is computed in float32 and rounded once to its type, and all other tensors keep their bytes; tokenizer and
    chat template are the first adapter's, if it has them.

    Returns the Frobenius distance between the method's changes, before they are rounded to the base's type, and the
    weighted sum of changes, as a share of the norm of that sum; None if the norm is zero, and for a fold. Raises
    ArtefactError and Refused as `lora_delta.read_adapter`, `lora_delta.weight_names` and `safetensors_io.rewrite` do,
    and Refused for a quantised base or if the adapters do not name one base.
    """
    adapters = [lora_delta.read_adapter(folder) for folder, _ in parts]
    weights = [weight for _, weight in parts]
    of = [adapter.config.get("base_model_name_or_path") for adapter in adapters]
    if len(set(of)) > 1:
        named = " and ".join(f"{adapter.folder}: {base_of}" for adapter, base_of in zip(adapters, of, strict=True))
        raise Refused(f"only adapters of one base can be blended, and these name several ({named})")
    stored = tensors_of(base)
    modules = lora_delta.weight_names(adapters, base, stored)
    if method == "cat" or method == "svd":
        error = _blend_factors(method, adapters, weights, out)
        _copy(parts[0][0], out, hub.TOKENIZER)
        return error
    tally: dict[str, tuple[float, float]] = {}

    def change(name: str) -> safetensors_io.Change | None:
        if name not in modules:
            return None
        module = modules[name]
        places = [place for place, adapter in enumerate(adapters) if module in adapter.factors]
        changes = [adapters[place].delta(module) for place in places]
        factors = [weights[place] for place in places]
        generators = [lora_delta.generator(seed, place, name) for place in places]
        thresholds = [lora_delta.threshold(one, density) for one in changes] if method == "ties" else []
        lost = size = 0.0

        def add(rows: Tensor, first: int) -> None:
            nonlocal lost, size
            dense = [delta.rows(first, len(rows)) for delta in changes]
            if method == "fold":
                rows.add_(dense[0])
                return
            exact = blended = lora_delta.linear(dense, factors)
            if method == "ties":
                blended = lora_delta.ties(dense, factors, thresholds)
            elif method == "dare":
                blended = lora_delta.dare(dense, factors, density, generators)
            rows.add_(blended)
            lost += float((blended - exact).double().square().sum())
            size += float(exact.double().square().sum())
            tally[name] = (lost, size)

        return add

    out.mkdir(parents=True, exist_ok=True)
    with progress(f"{method} {' '.join(folder.name for folder, _ in parts)}", len(stored)) as advance:
        safetensors_io.rewrite(stored, out, change, advance=advance)
    complete(base, parts[0][0], out)
    return _share(tally)


def _blend_factors(
    method: Method, adapters: Sequence[lora_delta.Adapter], weights: Sequence[float], out: Path
) -> float | None:
    """Write the blend as an adapter of scale 1. Returns its distance from the exact sum as a share of its norm."""
    from safetensors.torch import save

    tensors, ranks = {}, {}
    tally: dict[str, tuple[float, float]] = {}
    for module in sorted({module for adapter in adapters for module in adapter.factors}):
        having = [(a, weight) for a, weight in zip(adapters, weights, strict=True) if module in a.factors]
        exact = lora_delta.stack([a.delta(module) for a, _ in having], [weight for _, weight in having])
        own = max(a.factors[module][0].shape[0] for a, _ in having)
        delta = exact if method == "cat" else lora_delta.truncate(exact, own)
        written = lora_delta.Delta(delta.left.float(), delta.right.float())
        lost = lora_delta.norm(lora_delta.stack([written, exact], [1.0, -1.0]))
        tally[module] = (lost**2, lora_delta.norm(exact) ** 2)
        ranks[module] = written.left.shape[1]
        tensors[f"{opening.PREFIX}{module}.lora_A.weight"] = written.right
        tensors[f"{opening.PREFIX}{module}.lora_B.weight"] = written.left
    (out / opening.WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
    write_json(out / opening.CONFIG, lora_delta.blended_config(adapters, ranks))
    return _share(tally)


def tensors_of(source: Path) -> dict[str, safetensors_io.Stored]:
    """The tensors of a full model by name. Raises Refused if they are quantised, ArtefactError if it is no model."""
    config = source / "config.json"
    try:
        declared = json.loads(config.read_bytes())
        parts = [declared, *(part for part in declared.values() if isinstance(part, dict))]
    except (FileNotFoundError, ValueError, AttributeError):
        raise ArtefactError(f"{config} is missing or malformed, so {source} is not a model; fetch it again") from None
    if any("quantization_config" in part for part in parts):
        raise Refused(
            f"{source} holds quantised weights (quantization_config in config.json), and an adapter is never folded "
            "into those; use the checkpoint that it was made of"
        )
    return safetensors_io.read_index(source)


def complete(source: Path, adapter: Path, out: Path) -> None:
    """Copy the other files of a full model: the base's configs, and the adapter's tokenizer or else the base's."""
    _copy(source, out, hub.CONFIGS)
    _copy(adapter if (adapter / "tokenizer_config.json").exists() else source, out, hub.TOKENIZER)


def _copy(source: Path, out: Path, names: Sequence[str]) -> None:
    """Copy those of the named files that exist."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def _share(tally: Mapping[str, tuple[float, float]]) -> float | None:
    """The root of the lost squares over all squares; `tally` has both sums by name. None if all are zero."""
    lost, size = (math.fsum(sums[i] for sums in tally.values()) for i in (0, 1))  # exact, in whatever order
    return math.sqrt(lost / size) if size else None


def _prompts(params: Params, task: Task, adapter: Path) -> list[str]:
    """A few prompts in the form of training and exams, from the pool that neither of them draws from."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(adapter, trust_remote_code=False)
    cases = task.cases(CASES, SEED, pool="mine", mix=task.checks.mixes[0])
    return [
        render(tokenizer, task.prompt(case.facts), mode.thinking) for case in cases for mode in params.modes.values()
    ]


def _card(name: str, task: Task, result: Mapping[str, Any], records: str, in_four_bits: bool) -> str:
    """The README.md: a Hugging Face model card. `records`: as in `model_card.write`."""
    folder = paths.base(task.name)
    base = bases.reference(folder) or {"repo": str(folder), "quantize": "none"}
    return render_page(
        "merge_card", name=name, task=task, method=result["method"], versions=result["versions"], base=base["repo"],
        quantize="nf4" if in_four_bits else base["quantize"], full=result["method"] not in ("cat", "svd"),
        folder=paths.merged(name), result=RESULT, records=records,
    )  # fmt: skip
