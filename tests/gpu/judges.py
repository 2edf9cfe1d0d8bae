"""The imaging policy with its two judges resident beside it: memory beside the estimate, and requests a minute."""

import json
import time
from pathlib import Path

import shaped

from clinrl.runtime import determinism


def main(arguments: list[str] | None = None) -> None:
    """Load three models, ask both judges; print the rows."""
    asked = shaped.options().parse_args(arguments)
    determinism.settle(1)
    from clinrl.config.params import load_params
    from clinrl.models.generate import Prompt, Sampler

    spec = load_params(Path(shaped.ROOT) / "params.yaml").bases["imaging"].full
    names = {repo: name for name, repo in shaped.REPOS.items()}
    models = {"policy": spec, **spec.judges}
    estimate, held = 0, {}
    shaped.forget()
    for role, one in models.items():
        nf4, name = one.quantize == "nf4", names[one.repo]
        held[role] = shaped.load(shaped.checkpoint(name, tiny=asked.tiny), nf4=nf4)[:2]
        estimate += shaped.estimate_gb(name, nf4=nf4, tiny=asked.tiny).weights
    rows = [
        ("policy and judges resident", round(shaped.held_gb(), 3), "GB", f"estimate of weights {estimate / 1e9:.3f}")
    ]
    count, budget, words = (2, 4, 20) if asked.tiny else (32, 32, 600)
    for role in spec.judges:
        model, tokenizer = held[role]
        ids = tokenizer("A scan is appropriate. " * words)["input_ids"][:words]
        began = time.perf_counter()
        Sampler(model.eval(), tokenizer, scale="full").sample(
            [Prompt("judge", [], ids)] * count, thinking=False, temperature=0.0, budget=budget, seed=0
        )
        taken_s = time.perf_counter() - began
        rows.append(
            (f"{role} asked", round(60 * count / taken_s, 1), "requests/min", f"{words} tokens, {budget} written")
        )
    rows.append(("policy and judges, asked, peak", round(shaped.held_gb(), 3), "GB", ""))
    print(json.dumps(rows))


if __name__ == "__main__":
    determinism.pin()
    main()
