"""A search on a tiny ViT without engines: its objective is accuracy alone, and what is drawn takes a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compress.recipe import Recipe, check
from compress.search.search import Outcome, search
from foundation.core.progress import ConsoleProgress
from tests.tiny_recipes import tiny_vit

QUANTIZED = {"quantize.calibration.method": ["minmax", "mse"], "quantize.smoothquant": [True, False]}
STAGES: list[dict[str, Any]] = [
    {"finetune": {"epochs": 0.2, "learning_rate": 1e-3}},
    {"quantize": {"calibration": {"rows": 32, "method": "mse"}}},
]


def tiny_search(space: dict[str, Any] = QUANTIZED, stages: list[dict[str, Any]] = STAGES, **settings: Any) -> Recipe:
    """Returns a recipe with a search; `settings` are further keys of the search, `goals` and `target` of the recipe."""
    recipe = {key: settings.pop(key) for key in ("goals", "target") if key in settings}
    raw = {**tiny_vit("tiny"), "target": {"engines": ["onnxruntime"], "batch_sizes": [1]}, **recipe, "stages": stages}
    return check({**raw, "search": {"space": space, "objectives": ["metric"], **settings}})


def run_search(recipe: Recipe, folder: Path) -> Outcome:
    """Runs a search without a word; what a forked process does, too."""
    return search(recipe, folder, progress=ConsoleProgress("silent"))
