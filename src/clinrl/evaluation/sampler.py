"""Opens the sampler that answers an exam, a model in this process or a server, and the journal of its answers."""

import sys
from collections.abc import Mapping
from typing import Any

from clinrl import paths
from clinrl.analysis.run import Run
from clinrl.artifacts import digest, read_manifest
from clinrl.config.machine import machine_at
from clinrl.config.model import Model
from clinrl.config.params import Params
from clinrl.errors import EngineError
from clinrl.evaluation.answers import SEED
from clinrl.models.generate import Sampler, shares
from clinrl.models.journal import Journal
from clinrl.runtime import determinism, gpus
from clinrl.tasks import importing


def open_sampler(params: Params, model: Model) -> Sampler:
    """The sampler of a model, with its weights loaded. It also makes this process deterministic.

    Raises ParamsError if machine.yaml is wrong, or names a GPU that CUDA_VISIBLE_DEVICES does not show.
    """
    machine = machine_at(params.scale)
    # CUDA counts its GPUs at an import that asks for them; a notebook's second exam keeps that of its first.
    if machine.gpu is not None and "transformers" not in sys.modules:
        gpus.show_one(machine.gpu)
    determinism.settle(SEED, shares=model.task.shares_threads)  # before torch is imported
    from clinrl.models import bases, engine, opening

    bounds: dict[str, Any] = {"scale": params.scale}
    bounds |= {"max_tokens": machine.exam_tokens} if machine.exam_tokens else {}
    is_whole, is_adapter = ((model.folder / name).exists() for name in ("config.json", opening.CONFIG))
    if is_adapter:
        opening.check(model.folder)
    if machine.sampler == "vllm":
        if is_whole:
            raise EngineError(
                f"{model.name} is a full model, and `clinrl engine` serves a base with adapters; set sampler to "
                "transformers in machine.yaml"
            )
        served = engine.connect(model.task.name, machine.vllm)
        if is_adapter:
            served.adopt(model.folder)
            served.check_adopted()
        return served
    if is_whole:
        sampler = Sampler(*bases.open_base(model.folder, for_training=False), **bounds)
    else:
        spec = read_manifest(model.folder).spec
        qlora = bool(spec.get("qlora", False))
        weights, tokenizer = bases.load(params, model.task.name, for_training=False, qlora=qlora)
        if is_adapter:
            weights = opening.adapted(weights, model.folder).eval()
        sampler = Sampler(weights, tokenizer, shared=shares(spec), **bounds)
    if params.scale == "full":
        sampler.identity = bases.identity_of(sampler.model, paths.base(model.task.name))
    return sampler


def open_journal(params: Params, run: Run, inputs: Mapping[str, str]) -> Journal | None:
    """The journal of an exam: that of a killed run, or a new one. None for imported cases, whose text is not stored."""
    if any(map(importing.is_imported, run.cases)):
        return None
    model = run.model
    described = [params.scale, run.modes, model.variants, model.variant, SEED, run.task.version, dict(inputs)]
    return Journal(paths.journal(model.name, digest([*described, determinism.record()])))
