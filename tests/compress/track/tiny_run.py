"""The recipe that the tests of where runs are sent to run, and its steps."""

from typing import Any

from tests.tiny_recipes import tiny_vit

RAW: dict[str, Any] = {
    **tiny_vit("tiny"),
    "target": {"engines": ["openvino"], "batch_sizes": [1]},
    "stages": [{"finetune": {"epochs": 0.05, "learning_rate": 1e-3}}, {"export": {}}],
}
STEPS = {"model", "finetune", "evaluate-finetune", "export", "latency"}
