"""The README.md of an adapter: a Hugging Face model card written from what the manifest holds, and nothing else."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def write(manifest: Mapping[str, Any], *, lineage: Sequence[str]) -> str:
    """The card's text. `manifest` holds a manifest's fields but `files`; `lineage` names the versions, root first."""
    spec, name, task = manifest["spec"], manifest["name"], manifest["task"]
    chain = " → ".join([f"{task}-base", *lineage])
    digests = "\n".join(f"| {key} | `{value}` |" for key, value in sorted(manifest["inputs"].items()))
    recipe = {key: spec[key] for key in ("method", "lora", "trainer", "stream", "modes")}
    recipe |= {"reward": spec["reward"]} if spec["method"] == "grpo" else {"omit": spec["omit"]}
    method = (
        "GRPO (group-relative policy optimisation) on the task's reward"
        if spec["method"] == "grpo"
        else "supervised fine-tuning on gold answers, with the gaps declared under `omit`"
    )
    return f"""---
library_name: peft
base_model: data/bases/{task}
pipeline_tag: text-generation
language: en
tags:
- lora
- {spec["method"]}
- trl
- clinical
- synthetic-data
- research-only
---

# {name}

A LoRA adapter for the clinrl task `{task}` (version {manifest["task_version"]}), trained by {method} at scale
`{spec["scale"]}`.

**Research only.** Trained and examined on synthetic cases; no patient's data were used and no clinician has
validated it. It must not inform the care of any person.

## Intended use

Reproducible research on rewards, warm starts and dual-mode evaluation of clinical reasoning.

## Out of scope

Any clinical use: triage, diagnosis, treatment, billing, or advice to patients or staff. Real notes differ from the
synthetic ones in language, length and case mix; no result on them is known.

## Lineage

{chain}

`{name}` starts from the weights of `{spec["parent"]}` and was trained on the data set `{spec["data"]}` with the
recipe `{spec["profile"]}` and seed {spec["seed"]}.

| input | digest |
| --- | --- |
{digests}

## Recipe

```json
{json.dumps(recipe, indent=2, sort_keys=True, ensure_ascii=False)}
```

## Use

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained("data/bases/{task}")
model = PeftModel.from_pretrained(base, "data/adapters/{name}")
tokenizer = AutoTokenizer.from_pretrained("data/adapters/{name}")
```

`history.jsonl` holds one line of training metrics a step; `manifest.json` the digest of every file.
"""
