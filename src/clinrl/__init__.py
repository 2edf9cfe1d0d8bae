"""clinrl: trains, examines, merges and registers GRPO LoRA adapters for clinical reasoning. Research only."""

__version__ = "0.1.0"
