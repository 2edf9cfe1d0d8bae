"""A small valid params.yaml as a mapping, for tests to edit: independent of the project's own, which is tuned."""

from typing import Any

TRAINER = {"lr": 1.0e-3, "steps": 40, "prompts": 4, "group": 8, "temperature": 1.0, "beta": 0.0, "max_completion": 120}
LORA = {"rank": 16, "alpha": 32, "targets": "all-linear"}

VALID: dict[str, Any] = {
    "scale": "embedded",
    "bases": {
        "esi": {
            "exam": "esi-x1",
            "embedded": {
                "template": "qwen3_5_think", "vocab": 1024, "hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2,
                "mlp": 384, "cases": 60000, "forget": 0.3, "steps": 2400, "batch": 32, "lr": 3.0e-3,
                "prompt_weight": 0.1, "seed": 1,
            },
            "full": {"repo": "Qwen/Qwen3.5-9B", "revision": "main", "quantize": "nf4"},
        }
    },
    "modes": {
        "think": {"thinking": True, "temperature": 0.0, "max_new_tokens": {"embedded": 120, "full": 1024}},
        "direct": {"thinking": False, "temperature": 0.0, "max_new_tokens": {"embedded": 100, "full": 1024}},
    },
    "datasets": {
        "esi-d1": {"task": "esi", "task_version": 2, "use": "train", "mix": "natural", "cases": 4000, "seed": 7},
        "esi-m1": {"task": "esi", "task_version": 2, "use": "mine", "mix": "reporting", "cases": 800, "seed": 501},
        "esi-x1": {"task": "esi", "task_version": 2, "use": "exam", "mix": "reporting", "cases": 800, "seed": 1001},
    },
    "profiles": {
        "sft": {
            "method": "sft",
            "modes": ["think", "direct"],
            "lora": {**LORA},
            "omit": {"severe_pain": 0.65},
            "stream": {"repeat": {}, "cap": {}},
            "trainer": {
                "embedded": {"lr": 3.0e-3, "steps": 120, "batch": 32},
                "full": {"lr": 2.0e-4, "steps": 4800, "batch": 16, "micro_batch": 4},
            },
        },
        "grpo": {
            "method": "grpo",
            "modes": ["think", "direct"],
            "lora": {**LORA},
            "stream": {"repeat": {1: 5}, "cap": {1: 0.33}},
            "reward": {"kind": "asymmetric", "valve": 0.0, "unreadable": -2.0},
            "trainer": {"embedded": TRAINER, "full": {**TRAINER, "steps": 500, "max_completion": 512}},
        },
    },
    "versions": {
        "v1": {"task": "esi", "parent": "esi-base", "data": "esi-d1", "exam": "esi-x1", "profile": "sft", "seed": 43},
        "v2": {"task": "esi", "parent": "v1", "data": "esi-d1", "exam": "esi-x1", "profile": "grpo", "seed": 46},
        "v3": {"task": "esi", "parent": "v1", "data": "esi-d1", "exam": "esi-x1", "profile": "grpo", "seed": 47},
    },
    "mining": {"v2": {"task": "esi", "data": "esi-m1"}},
    "merges": {
        "folds": {"v3-full": {"task": "esi", "version": "v3", "exam": "esi-x1"}},
        "blends": {
            "v2-v3": {
                "task": "esi", "first": "v2", "second": "v3", "method": "ties", "weights": [0.5, 0.5], "density": 0.5,
                "exam": "esi-x1",
            },
        },
    },
    "comparisons": {
        "recipes": {
            "task": "esi",
            "columns": ["exact", "kappa"],
            "parts": "level",
            "arms": {"plain": ["v2", "v3"], "labels": ["v1"]},
            "tests": [{"first": "plain", "second": "labels", "says": "the reward"}],
            "published": {"plain": {"exact": 0.75}},
        },
    },
    "gates": {
        "esi": {
            "least_cases": 500,
            "limits": {
                "critical_under": {"max": {"embedded": 0.02, "full": 0.0}, "may_rise": 0.0},
                "exact": {"may_fall": 0.0, "paired": True},
            },
        },
    },
    "plans": {
        "esi": {
            "changes": {
                "ancestors": ["v1"], "exam": "esi-x1", "most_cases": 4000, "recipes": ["sft", "grpo"],
                "fields": {
                    "trainer.embedded.lr": {"min": 1.0e-4, "max": 5.0e-3},
                    "reward.modifiers": {"min": -1.0, "max": 1.0}, "reward.unreadable": {"max": 0.0},
                    "stream.cap.1": {"one_of": [0.33, 0.5]},
                },
            },
            "protocol": {"superior": "exact", "not_worse": {"critical_under": 0.01}, "screen": 0.05},
            "budget": {"alpha": 0.05, "spend": 0.6, "looks": 6},
            "impact": "A worse model under-triages more patients.",
        },
    },
    "schedules": {"esi": {"cron": "0 3 * * 1", "timezone": "Europe/Zurich", "answer_within_s": 3600}},
}  # fmt: skip
