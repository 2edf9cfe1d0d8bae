"""clinrl: trains, examines, merges and registers GRPO LoRA adapters for clinical reasoning. Research only."""

__version__ = "0.1.0"

import clinrl_loader as clinrl_loader  # before MLflow could import the copy that lies in a registered folder
