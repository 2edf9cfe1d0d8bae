"""The shapes of checkpoints that the recipes name, for an estimate before their configs are in the hub's cache.

They are copies. If the cache has a checkpoint's own config.json, that one is used instead.
"""

from collections.abc import Mapping
from typing import Any

SHAPES: Mapping[str, Mapping[str, Any]] = {
    # The model card of Qwen/Qwen3.5-9B, and the defaults of transformers' Qwen3_5TextConfig, which are of that size:
    # three layers of Gated DeltaNet (32 heads for V, 16 for QK, of 128) to one of attention.
    "Qwen/Qwen3.5-9B": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "full_attention_interval": 4, "tie_word_embeddings": False,
    },
    # Table 3 of "The Llama 3 Herd of Models" (arXiv:2407.21783): 8.03 billion parameters.
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    # The model cards of Qwen2.5: 3.09 and 7.62 billion parameters; of Qwen1.5-1.8B: 1.84 billion.
    "Qwen/Qwen2.5-3B-Instruct": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "Qwen/Qwen1.5-1.8B-Chat": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5504,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""By repository, the fields of its config.json that determine memory."""
