"""The memory that a model takes, from its config alone: its layers are built and run as shapes, without any values.

Weights, keys and values, and what a layer keeps for its backward pass are counted on torch's meta device. The temporary
memory of kernels is estimated.
"""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from clinrl.artifacts import canonical_json
from clinrl.errors import Refused

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a number in 4 bits: 64 numbers share a scale of one byte, and 256 scales share four bytes."""
GIB = 1 << 30
"""Bytes."""
TRAINED = 8
"""Bytes of a trained number and its gradient, in float32, without the optimizer's moments."""
LOGIT = 10
"""Bytes of a logit in a training step: itself, a copy, its gradient and their versions in float32."""
TILE_TOKENS, TILE_WORDS = 4096, 32768
"""Logits that TRL's fused head holds at once on a GPU (trl.kernels.chunked_logprob)."""
SCORED_STATE = 8
"""Bytes of a number in the last layer's output for a scored token: itself, a copy, and its gradient in float32."""
PASSING = 3
"""A layer that runs without a backward pass holds about a third of what it would keep for one."""
SLACK, CPU_SLACK = 1.1, 1.6
"""Factor from counted to real temporary memory. On a GPU it covers what the allocator cannot use. On the CPU, a forward
and backward pass of three embedded models took 0.9 to 1.6 of what is counted."""
SHORT, LONG = 64, 128
"""Tokens of the two runs. Both are short, because attention on the meta device keeps its scores, as no kernel does."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model's memory, in bytes unless a field says otherwise."""

    weights: int
    adapter: int
    """Numbers of its LoRA adapter."""
    unpacked: int
    """The largest matrix, unpacked from 4 bits for computing; 0 if the model is not in 4 bits."""
    kept: int
    """A token's states between the layers, which gradient checkpointing keeps."""
    state: int
    """Numbers in a token's state between two layers."""
    layer: int
    """What the widest layer keeps of a token for its backward pass."""
    layers: int
    """What all layers keep of a token for their backward passes."""
    token: int
    """A token's keys and values."""
    row: int
    """What a row needs besides them, whatever its length: the states of layers without keys."""
    vocab: int
    """Words."""
    multiplied: int
    """Numbers in the matrices that multiply a token."""
    packed: int
    """Those of them that are held in 4 bits."""
    depth: int
    """Layers."""
    widened: int
    """Extra memory of a token without a backward pass: the output of the widest adapted matrix, twice in float32; 0 if
    all is float32, where adapters are merged into the weights."""
    is_tiled: bool
    """Whether a training computes its logits tile by tile, as on a GPU."""
    slack: float
    """SLACK or CPU_SLACK."""

    def training(self, tokens: int, scored: int, *, checkpointed: bool, moments: int = 8) -> int:
        """Memory of a training step besides the weights: of all its `tokens`, and of the logits of `scored` tokens.

        adapter x (8 + moments) + slack x (tokens x what is kept + logits x 10 + largest matrix). There are
        scored x vocabulary logits; on a GPU, the logits of one tile instead, plus scored x state x 8 bytes.
        """
        logits = scored * self.vocab * LOGIT
        if self.is_tiled:
            logits = min(scored, TILE_TOKENS) * min(self.vocab, TILE_WORDS) * LOGIT + scored * self.state * SCORED_STATE
        moving = tokens * (self.kept + self.layer if checkpointed else self.layers) + logits
        return round(self.adapter * (TRAINED + moments) + self.slack * (moving + self.unpacked))

    def writing(self, prompt: int, tokens: int, rows: int) -> int:
        """Memory of completions besides the weights: `rows` of `tokens` each, of which `prompt` are the prompt.

        slack x (rows x (tokens x keys and values + states + vocabulary x 10) + the prompts' pass + largest matrix). In
        that pass an adapter's products stay in float32 beside those of its matrix, since autocast does not narrow them.
        """
        held = rows * (tokens * self.token + self.row + self.vocab * LOGIT)
        passing = self.layer // PASSING + self.widened
        return round(self.slack * (held + rows * prompt * passing + self.unpacked))

    def looking(self, tokens: int) -> int:
        """Memory of log-probabilities: slack x (tokens x (vocabulary x 10 + a layer's pass) + largest matrix)."""
        return round(self.slack * (tokens * (self.vocab * LOGIT + self.layer // PASSING) + self.unpacked))


def measure(
    config: dict[str, Any], *, nf4: bool, half: bool, rank: int = 0, targets: str | tuple[str, ...] = ()
) -> Size:
    """The size of the model that a config.json describes, with a LoRA adapter of a rank on some modules.

    `nf4`: matrices are held in 4 bits; `half`: computed in bfloat16, otherwise in float32. Raises Refused if
    transformers has no decoder for the config.
    """
    try:
        return _measured(canonical_json(config), nf4, half, rank, targets)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        name = config.get("model_type", "without a model_type")
        raise Refused(
            f"a decoder {name} cannot be measured ({type(error).__name__}); `try_anyway` trains it"
        ) from error


@cache
def _measured(config: str, nf4: bool, half: bool, rank: int, targets: str | tuple[str, ...]) -> Size:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in json.loads(config).items() if key != "quantization_config"}
    dtype = torch.bfloat16 if half else torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**fields).get_text_config(),
            dtype=dtype,
            attn_implementation="sdpa",
            trust_remote_code=False,
        )
    head = model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    packed = sum(module.weight.numel() for module in linear.values()) if nf4 else 0
    numbers = sum(parameter.numel() for parameter in model.parameters())
    adapted = [
        module for name, module in linear.items() if targets == "all-linear" or name.rpartition(".")[2] in targets
    ]
    body = model.get_decoder()
    kinds = getattr(model.config, "layer_types", None) or [""] * len(body.layers)
    runs = {kind: _run(model, kinds.index(kind)) for kind in dict.fromkeys(kinds)}
    each = [runs[kind] for kind in kinds]
    return Size(
        weights=round((numbers - packed) * dtype.itemsize + packed * NF4),
        adapter=rank * sum(module.in_features + module.out_features for module in adapted),
        unpacked=max(module.weight.numel() for module in linear.values()) * dtype.itemsize if nf4 else 0,
        kept=len(each) * model.config.hidden_size * dtype.itemsize,
        state=model.config.hidden_size,
        layer=max(kept for kept, _, _ in each),
        layers=sum(kept for kept, _, _ in each),
        token=sum(token for _, token, _ in each),
        row=sum(row for _, _, row in each),
        vocab=model.config.vocab_size,
        multiplied=sum(module.weight.numel() for module in linear.values()) + head.weight.numel(),
        packed=packed,
        depth=len(each),
        widened=max((2 * 4 * module.out_features for module in adapted), default=0) if half else 0,
        is_tiled=half,
        slack=SLACK if half else CPU_SLACK,
    )


def _run(model: Any, place: int) -> tuple[int, int, int]:
    """Run one layer; return its bytes for a token's backward pass, for a token's keys and values, and for a row."""
    import torch
    from transformers import DynamicCache

    body, own = model.get_decoder(), {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    held = []
    for length in (SHORT, LONG):
        states = torch.zeros(1, length, model.config.hidden_size, device="meta", dtype=model.dtype)
        turns = body.rotary_emb(states, torch.zeros(1, length, dtype=torch.long, device="meta"))
        room = DynamicCache(config=model.config)
        with torch.no_grad():
            body.layers[place](states, position_embeddings=turns, past_key_values=room, use_cache=True)
        held.append(_bytes(vars(room.layers[place])))
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # a reference, so that no new storage gets the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        body.layers[place].train()(states.requires_grad_(), position_embeddings=turns)
    token = (held[1] - held[0]) // (LONG - SHORT)
    return sum(storage.nbytes() for storage in kept.values()) // LONG, token, held[0] - SHORT * token


def _bytes(value: Any) -> int:
    """The size of all tensors in a value."""
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return value.nbytes if hasattr(value, "nbytes") else 0
