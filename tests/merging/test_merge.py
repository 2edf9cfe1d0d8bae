"""Merging: folds against PEFT and against float64, blends against their sums, the stage on the doll, every refusal."""

import functools
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dolls
from clinrl import paths
from clinrl.artifacts import exclusive, identity, read_manifest, seal, staged, verified
from clinrl.errors import ArtefactError, Busy, Refused
from clinrl.merging import check, merge, safetensors_io
from clinrl.models import bases

KINDS = ("qwen3", "llama", "qwen3_5")
LORA = {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"}


def model(kind: str):
    """A real architecture with a few thousand parameters."""
    import transformers as t

    torch.manual_seed(0)
    size = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    if kind == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**size, **heads, tie_word_embeddings=True))
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**size, **heads, attention_bias=True))
    linear = {f"linear_{part}": 2 for part in ("num_key_heads", "num_value_heads")}
    linear |= {f"linear_{part}_head_dim": 8 for part in ("key", "value")}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    config = t.Qwen3_5Config(text_config=size | heads | linear | kinds, vision_config=vision)
    return t.Qwen3_5ForConditionalGeneration(config)


def adapt(base: Path, out: Path, seed: int = 0, **lora) -> Path:
    """An adapter in PEFT's format with random factors."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(**LORA | lora, init_lora_weights=False, task_type="CAUSAL_LM")
        adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        adapted.save_pretrained(out, save_embedding_layers=False)
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base of a kind and a type with its adapter, made once."""

    @functools.cache
    def make(kind: str = "qwen3", dtype: torch.dtype = torch.float32, **lora) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(kind)
        model(kind).to(dtype).save_pretrained(folder / "base")
        return folder / "base", adapt(folder / "base", folder / "adapter", **lora)

    return make


def altered(folder: Path, out: Path, **tensors) -> Path:
    """A copy of a checkpoint with some tensors replaced."""
    shutil.copytree(folder, out)
    file = next(out.glob("*.safetensors"))
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return out


def reconfigured(folder: Path, out: Path, name: str, **fields) -> Path:
    shutil.copytree(folder, out)
    (out / name).write_text(json.dumps(json.loads((out / name).read_text()) | fields))
    return out


def logits(base: Path, *parts: tuple[Path, float]) -> torch.Tensor:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for number, (folder, weight) in enumerate(parts):
        if number == 0:
            loaded = PeftModel.from_pretrained(loaded, str(folder), adapter_name="0")
        else:
            loaded.load_adapter(str(folder), adapter_name=str(number))
        for module in loaded.modules():
            if isinstance(module, LoraLayer) and str(number) in module.scaling:
                module.set_scale(str(number), weight)
    if parts:
        loaded.base_model.set_adapter([str(number) for number in range(len(parts))])
    with torch.no_grad():
        return loaded.eval()(input_ids=torch.arange(40)[None]).logits


def in_float64(base: Path, *parts: tuple[Path, float]) -> dict[str, torch.Tensor]:
    """Every changed weight by the definition, for adapters without patterns."""
    exact = {}
    for folder, weight in parts:
        config = json.loads((folder / "adapter_config.json").read_text())
        factors = {name: tensor.double() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
        for name, down in factors.items():
            if ".lora_A." in name:
                target = name.removeprefix("base_model.model.").replace(".lora_A", "")
                before = exact.get(target, load_file(base / "model.safetensors")[target].double())
                scale = weight * config["lora_alpha"] / config["r"]
                exact[target] = before + scale * factors[name.replace("lora_A", "lora_B")] @ down
    return exact


def by_peft(base: Path, adapter: Path, dtype: torch.dtype, out: Path, *, safe: bool) -> dict[str, torch.Tensor]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), str(adapter))
    loaded.merge_and_unload(safe_merge=safe).save_pretrained(out)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fold_is_that_of_peft_to_the_bit_and_nearer_than_its_safe_way(made, tmp_path, dtype):
    base, adapter = made("qwen3", dtype)
    merge.blend("fold", base, [(adapter, 1.0)], tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    theirs = by_peft(base, adapter, dtype, tmp_path / "peft", safe=False)
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[name], theirs[name]) for name in found)
    safe = by_peft(base, adapter, dtype, tmp_path / "safe", safe=True)
    distances, wrong = {"mine": 0.0, "safe": 0.0}, 0.0
    exact = in_float64(base, (adapter, 1.0))
    for name, value in exact.items():
        distances["mine"] += float((found[name].double() - value).abs().sum())
        distances["safe"] += float((safe[name].double() - value).abs().sum())
        wrong += float((found[name] != value.to(dtype)).sum())
    if dtype != torch.float32:
        assert distances["mine"] < 0.85 * distances["safe"], "the safe way rounds twice"
        assert wrong < 0.001 * sum(value.numel() for value in exact.values())


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_folded_model_needs_no_peft_and_says_the_same(made, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(safetensors_io, "MAX_SHARD_BYTES", 6_000)
    base, adapter = made(kind)
    merge.blend("fold", base, [(adapter, 1.0)], tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    expected = logits(base, (adapter, 1.0))
    torch.testing.assert_close(logits(tmp_path / "out"), expected, atol=2e-5, rtol=1e-4)
    assert float((logits(base) - expected).abs().max()) > 0.01
    assert (tmp_path / "out/config.json").read_bytes() == (base / "config.json").read_bytes()


def test_scales_of_rslora_and_of_patterns_are_those_of_peft(made, tmp_path):
    base, _ = made()
    patterns = {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 1}, "alpha_pattern": {"down_proj": 9}}
    adapter = adapt(base, tmp_path / "adapter", use_rslora=True, **patterns)
    merge.blend("fold", base, [(adapter, 1.0)], tmp_path / "out")
    torch.testing.assert_close(logits(tmp_path / "out"), logits(base, (adapter, 1.0)), atol=1e-5, rtol=1e-4)


def test_an_output_layer_of_its_own_is_folded(made, tmp_path):
    base, _ = made("llama")
    adapter = adapt(base, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    merge.blend("fold", base, [(adapter, 1.0)], tmp_path / "out")
    torch.testing.assert_close(logits(tmp_path / "out"), logits(base, (adapter, 1.0)), atol=1e-5, rtol=1e-4)


def test_equal_inputs_give_equal_bytes(made, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_io, "MAX_SHARD_BYTES", 9_000)
    base, adapter = made()
    for name in ("one", "two"):
        merge.blend("fold", base, [(adapter, 1.0)], tmp_path / name)
    assert dolls.files(tmp_path / "one") == dolls.files(tmp_path / "two")


def test_an_adapter_of_another_base_is_refused(made, tmp_path):
    base, adapter = made()
    wide = altered(base, tmp_path / "wide", **{"model.layers.1.self_attn.q_proj.weight": torch.zeros(8, 16)})
    with pytest.raises(Refused, match=r"as \[16, 16\], but its weight in the base is \[8, 16\]"):
        merge.blend("fold", wide, [(adapter, 1.0)], tmp_path / "out")
    other, _ = made("qwen3_5")
    with pytest.raises(Refused, match="of which the base has no weight; it belongs to another base"):
        merge.blend("fold", other, [(adapter, 1.0)], tmp_path / "out")


def test_nothing_is_folded_into_quantised_weights(made, tmp_path):
    base, adapter = made()
    quantised = reconfigured(base, tmp_path / "q", "config.json", quantization_config={"quant_method": "bitsandbytes"})
    for make in (
        lambda: merge.blend("fold", quantised, [(adapter, 1.0)], tmp_path / "out"),
        lambda: merge.blend("linear", quantised, [(adapter, 1.0)], tmp_path / "out"),
    ):
        with pytest.raises(Refused, match="holds quantised weights"):
            make()
    name = "model.layers.0.mlp.up_proj.weight"
    packed = altered(base, tmp_path / "packed", **{name: torch.zeros(24, 16, dtype=torch.uint8)})
    with pytest.raises(Refused, match="as U8, and an adapter is never folded into quantised weights"):
        merge.blend("fold", packed, [(adapter, 1.0)], tmp_path / "out")


def test_a_result_that_is_not_finite_is_refused(made, tmp_path):
    base, adapter = made()
    broken = altered(base, tmp_path / "nan", **{"model.layers.0.mlp.up_proj.weight": torch.full((24, 16), torch.nan)})
    with pytest.raises(Refused, match=r"model.layers.0.mlp.up_proj.weight' would hold values that are infinite or not"):
        merge.blend("fold", broken, [(adapter, 1.0)], tmp_path / "out")


def test_an_adapter_that_cannot_be_folded_exactly_is_refused(made, tmp_path):
    base, adapter = made()
    dora = reconfigured(adapter, tmp_path / "dora", "adapter_config.json", use_dora=True)
    with pytest.raises(Refused, match="dora uses 'use_dora', which is not supported"):
        merge.blend("fold", base, [(dora, 1.0)], tmp_path / "out")
    with pytest.raises(Refused, match="dora uses 'use_dora', which is not supported"):
        merge.blend("cat", base, [(adapter, 1.0), (dora, 1.0)], tmp_path)


@pytest.mark.parametrize("method", ["cat", "svd", "linear", "ties", "dare"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_version_blended_with_itself_is_itself(made, tmp_path, method, dtype):
    base, adapter = made("qwen3", dtype)
    (tmp_path / "out").mkdir()
    assert merge.blend(method, base, [(adapter, 0.5)] * 2, tmp_path / "out") == pytest.approx(0, abs=1e-6)
    merge.blend("fold", base, [(adapter, 1.0)], tmp_path / "fold")
    if method in ("cat", "svd"):
        merge.blend("fold", base, [(tmp_path / "out", 1.0)], tmp_path / "again")
        exact = in_float64(base, (adapter, 1.0))
        found = load_file(tmp_path / "again/model.safetensors")
        step = torch.finfo(dtype).eps
        assert all(torch.allclose(found[n].double(), v, rtol=step, atol=2e-8) for n, v in exact.items())
    else:
        assert dolls.files(tmp_path / "out") == dolls.files(tmp_path / "fold"), "to the bit"


@pytest.fixture(scope="module")
def siblings(made, tmp_path_factory):
    """Three adapters of one base: two of one shape, and one of another rank, other modules and another scale."""
    base, first = made()
    folder = tmp_path_factory.mktemp("siblings")
    second = adapt(base, folder / "second", seed=1)
    third = adapt(base, folder / "third", seed=2, r=2, use_rslora=True, target_modules=["q_proj", "up_proj"])
    return base, first, second, third


def test_cat_is_the_weighted_sum_whatever_the_shapes(siblings, tmp_path):
    base, first, _, third = siblings
    parts = [(first, 0.7), (third, -1.2)]
    assert merge.blend("cat", base, parts, tmp_path) == pytest.approx(0, abs=1e-7)
    torch.testing.assert_close(logits(base, (tmp_path, 1.0)), logits(base, *parts), atol=1e-5, rtol=1e-4)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    ranks = {name: t.shape[0] for name, t in load_file(tmp_path / "adapter_model.safetensors").items() if "_A" in name}
    assert sorted(set(ranks.values())) == [3, 5]
    assert config["use_rslora"] is False


def test_svd_keeps_the_versions_rank_and_says_what_it_lost(siblings, tmp_path):
    base, first, second, _ = siblings
    parts = [(first, 0.5), (second, 0.5)]
    lost = merge.blend("svd", base, parts, tmp_path)
    assert 0.1 < lost < 0.9
    factors = load_file(tmp_path / "adapter_model.safetensors")
    assert {tensor.shape[0] for name, tensor in factors.items() if "lora_A" in name} == {3}
    before = {name: tensor.double() for name, tensor in load_file(base / "model.safetensors").items()}
    exact, found = in_float64(base, *parts), in_float64(base, (tmp_path, 1.0))
    gone = sum(float((exact[name] - found[name]).square().sum()) for name in exact)
    there = sum(float((exact[name] - before[name]).square().sum()) for name in exact)
    assert lost == pytest.approx((gone / there) ** 0.5, rel=1e-4)


def test_linear_is_the_weighted_sum_as_a_full_model(siblings, tmp_path):
    base, first, second, third = siblings
    parts = [(first, 0.7), (second, 0.1), (third, -1.2)]
    assert merge.blend("linear", base, parts, tmp_path / "out") == 0
    torch.testing.assert_close(logits(tmp_path / "out"), logits(base, *parts), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", ["ties", "dare"])
def test_sparse_blends_are_drawn_alike_and_say_what_they_lost(siblings, tmp_path, method):
    base, first, second, _ = siblings
    parts = [(first, 0.5), (second, 0.5)]
    lost = [
        merge.blend(method, base, parts, tmp_path / f"{seed}-{time}", density=0.5, seed=seed)
        for seed in (1, 2)
        for time in (1, 2)
    ]
    assert lost[0] == lost[1]
    assert 0.1 < lost[0] < 2
    files = [dolls.files(tmp_path / f"{seed}-{time}") for seed in (1, 2) for time in (1, 2)]
    assert files[0] == files[1]
    assert (files[0] == files[2]) == (method == "ties"), "the seed is of what is drawn"
    name = "model.layers.0.mlp.up_proj.weight"
    before, exact = load_file(base / "model.safetensors"), in_float64(base, *parts)
    change = load_file(tmp_path / "1-1/model.safetensors")[name] - before[name]
    assert 0.05 < float((change == 0).float().mean()) < 0.5
    assert float((change * (exact[name] - before[name])).sum()) > 0


def test_changes_that_cancel_have_no_relative_error(siblings, tmp_path):
    base, first, *_ = siblings
    assert merge.blend("linear", base, [(first, 1.0), (first, -1.0)], tmp_path / "out") is None
    assert dolls.files(tmp_path / "out")["model.safetensors"] == dolls.files(base)["model.safetensors"]


def test_adapters_of_different_bases_are_not_blended(siblings, tmp_path):
    base, first, second, _ = siblings
    other = reconfigured(second, tmp_path / "other", "adapter_config.json", base_model_name_or_path="elsewhere")
    with pytest.raises(Refused, match=r"only adapters of one base can be blended.*elsewhere"):
        merge.blend("cat", base, [(first, 0.5), (other, 0.5)], tmp_path / "out")


MERGES = {
    "folds": {"v1-full": {"task": "esi", "version": "v1", "exam": "x1"}},
    "blends": {
        method: {"task": "esi", "first": "v1", "second": "v3", "method": method, "weights": [0.6, 0.4], "exam": "x1"}
        | ({"density": 0.5, "seed": 5} if method in ("ties", "dare") else {})
        for method in ("cat", "svd", "linear", "ties", "dare")
    },
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The doll's project with the adapters v1 and v3, written as the training process writes them."""
    from peft import LoraConfig, get_peft_model

    from clinrl.training import trl

    folder = shutil.copytree(dolls.built(), tmp_path_factory.mktemp("trained") / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        base = identity(read_manifest(paths.base("esi")))
        for seed, version in enumerate(("v1", "v3")):
            loaded, tokenizer = bases.load(dolls.params(), "esi", for_training=False)
            torch.manual_seed(seed)
            config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
            adapted = get_peft_model(loaded, config)
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(parameter, std=0.05)
            with staged(paths.adapter(version)) as out:
                trl.write_adapter(adapted, tokenizer, {"task": "esi"}, out)
                seal(out, kind="adapter", name=version, task="esi", task_version=2, spec={}, inputs={"base": base})
    return folder


@pytest.fixture
def project(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return dolls.params(merges=MERGES)


@pytest.mark.long
def test_a_fold_is_a_sealed_checked_model_that_loads_like_a_base(project):
    merge.stage(project, "v1-full")
    folder = paths.merged("v1-full")
    manifest = verified(folder)
    assert (manifest.kind, manifest.name, manifest.task, manifest.task_version) == ("merged", "v1-full", "esi", 2)
    assert (manifest.spec["method"], manifest.spec["versions"]) == ("fold", {"v1": 1.0})
    assert "waiver" not in manifest.spec
    assert manifest.inputs == {
        "base": identity(read_manifest(paths.base("esi"))),
        "v1": identity(read_manifest(paths.adapter("v1"))),
    }
    result = json.loads((folder / "merge.json").read_text())
    assert result["check"]["logits"]["difference"] < 1e-5
    assert result["check"]["logits"]["compared"] == 4 * 2 * 64
    assert result["check"]["agreement"] == 1.0
    assert result["check"]["weights"]["difference"] <= 0.501
    loaded, tokenizer = bases.open_base(folder, for_training=False)
    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    assert tokenizer.chat_template == dolls.TEMPLATE.read_text(encoding="utf-8")
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\nbase_model: data/bases/esi\n")
    assert "Research only." in card
    before = dolls.files(folder)
    merge.stage(project, "v1-full")
    assert dolls.files(folder) == before


@pytest.mark.long
@pytest.mark.parametrize("method", MERGES["blends"])
def test_a_blend_is_sealed_and_says_how_far_it_is_from_the_sum(project, method):
    fields = read_manifest(paths.adapter("v3")).model_dump(exclude={"files"})
    seal(paths.adapter("v3"), **fields | {"spec": {"waiver": "A control."}})
    merge.stage(project, method)
    manifest = verified(paths.merged(method))
    assert manifest.spec["waiver"] == "A control."
    assert manifest.spec["versions"] == {"v1": 0.6, "v3": 0.4}
    assert manifest.inputs.keys() == {"base", "v1", "v3"}
    assert ("seed" in manifest.spec) == (method in ("ties", "dare"))
    result = json.loads((paths.merged(method) / "merge.json").read_text())
    adapter = method in ("cat", "svd")
    assert (paths.merged(method) / "adapter_model.safetensors").exists() == adapter
    assert (paths.merged(method) / "model.safetensors").exists() == (not adapter)
    assert (paths.merged(method) / "tokenizer.json").exists()
    exact = method in ("cat", "linear")
    assert (result["relative_error"] == 0) == exact
    assert (result["check"]["logits"]["difference"] < 1e-5) == exact
    assert (result["check"]["logits"]["tolerance"] is not None) == exact
    assert (result["check"]["weights"] is not None) == (method == "linear")


@pytest.mark.long
def test_at_full_scale_the_checkpoint_behind_the_quantised_base_is_folded(project):
    shutil.copytree(paths.base("esi"), "checkpoint")
    spec = {
        **dolls.PARAMS["bases"]["esi"],
        "full": {"repo": str(Path("checkpoint").resolve()), "revision": "main", "quantize": "nf4"},
    }
    params = dolls.params(scale="full", bases={"esi": spec}, merges=MERGES)
    bases.stage(params, "esi")
    base = identity(read_manifest(paths.base("esi")))
    fields = read_manifest(paths.adapter("v1")).model_dump(exclude={"files"})
    seal(paths.adapter("v1"), **fields | {"inputs": {"base": base}})
    merge.stage(params, "v1-full")
    assert verified(paths.merged("v1-full")).inputs["base"] == base
    card = (paths.merged("v1-full") / "README.md").read_text()
    assert f"base_model: {Path('checkpoint').resolve()}\n" in card
    assert "trained above a copy of the base in nf4" in card
    merge.blend("fold", Path("checkpoint"), [(paths.adapter("v1"), 1.0)], Path("direct"))
    found = dolls.files(paths.merged("v1-full"))["model.safetensors"]
    assert found == dolls.files(Path("direct"))["model.safetensors"]


def test_an_altered_adapter_is_refused(project):
    with (paths.adapter("v1") / "adapter_model.safetensors").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(ArtefactError, match="was altered"):
        merge.stage(project, "v1-full")
    assert not paths.merged("v1-full").exists()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"inputs": {"base": "0" * 64}}, "was made from another base"),
        ({"task_version": 0}, "at version 0 of the task esi, which is now at 2"),
    ],
)
def test_an_adapter_of_another_base_or_task_version_is_refused(project, fields, sentence):
    folder = paths.adapter("v1")
    seal(folder, **read_manifest(folder).model_dump(exclude={"files"}) | fields)
    with pytest.raises(ArtefactError, match=sentence):
        merge.stage(project, "v1-full")


def test_a_model_that_does_not_say_the_same_is_not_kept(project, monkeypatch):
    honest = merge.blend

    def spoiled(method, base, parts, out):
        honest(method, base, parts, out)
        file = out / "model.safetensors"
        save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})

    monkeypatch.setattr(merge, "blend", spoiled)
    with pytest.raises(Refused, match="nothing was kept"):
        merge.stage(project, "v1-full")
    assert list(paths.merged("v1-full").parent.iterdir()) == []


def test_two_makers_of_one_merge_do_not_meet(project):
    with exclusive(paths.merged("v1-full")), pytest.raises(Busy, match="another command is writing"):
        merge.stage(project, "v1-full")


@pytest.mark.long
def test_a_full_model_of_an_architecture_with_a_tokenizer_class_of_its_own_is_checked_by_the_same_tokens(tmp_path):
    """Beside the config.json of a Qwen2, transformers splits text as Qwen2 does, not as the embedded one."""
    base = Path(__file__).parents[2] / "data/bases/audit"
    adapter = adapt(base, tmp_path / "adapter")
    for file in base.glob("*token*"):
        shutil.copy(file, adapter)
    parts = [(adapter, 1.0)]
    merge.blend("fold", base, parts, tmp_path / "whole")
    found = check.check(base, parts, tmp_path / "whole", ["Potassium 6.9 mmol/l, and nobody has called the ward."])
    assert found.logits.difference < 1e-5
    assert found.agreement == 1.0


def test_a_blend_of_adapters_that_learned_in_four_bits_is_read_above_such_a_base(project, monkeypatch):
    for version in ("v1", "v3"):
        folder = paths.adapter(version)
        manifest = read_manifest(folder)
        (folder / "manifest.json").unlink()
        fields = manifest.model_dump(exclude={"files"}) | {"spec": {"qlora": True}}
        seal(folder, **fields)
    for name, said in (("cat", None), ("linear", "trained above a copy of the base in nf4")):
        merge.stage(project, name)
        assert read_manifest(paths.merged(name)).spec.get("qlora", False) is (said is None)
        card = (paths.merged(name) / "README.md").read_text()
        assert ("in nf4" in card) is (said is not None)
