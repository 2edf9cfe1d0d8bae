"""Loading a shape in nf4 or bf16: seconds, and memory beside the doctor's estimate."""

import json

import shaped

from clinrl.runtime import determinism


def main(arguments: list[str] | None = None) -> None:
    """Load once from files that the page cache holds; print the rows."""
    asked = shaped.options("shape", "kind").parse_args(arguments)
    nf4 = asked.kind == "nf4"
    folder = shaped.checkpoint(asked.shape, tiny=asked.tiny)
    shaped.forget()
    model, _, taken_s = shaped.load(folder, nf4=nf4)
    size = shaped.estimate_gb(asked.shape, nf4=nf4, tiny=asked.tiny)
    what = f"load {asked.shape} in {asked.kind}"
    print(json.dumps([
        (what, round(taken_s, 2), "s", f"{sum(parameter.numel() for parameter in model.parameters()):,} numbers held"),
        (f"{what}, weights", round(model.get_memory_footprint() / 1e9, 3), "GB", f"estimate {size.weights / 1e9:.3f}"),
        (f"{what}, peak", round(shaped.held_gb(), 3), "GB", f"estimate {(size.weights + size.unpacked) / 1e9:.3f}"),
    ]))  # fmt: skip


if __name__ == "__main__":
    determinism.pin()
    main()
