"""A run without engines, for the metric of its last model on selection rows."""

from __future__ import annotations

from pathlib import Path

from compress.pipeline import run
from compress.recipe import Recipe
from compress.search.setup import Setup
from foundation.artifacts.run_folder import open_run
from foundation.artifacts.store import share


def evaluated(recipe: Recipe, folder: Path, setup: Setup) -> float:
    """Runs a recipe in the store of the search, or finds it finished; returns the primary metric of its last model in torch.

    Raises:
        InputError, ParityError, EngineError: A stage failed.
    """
    share(folder, setup.folder)
    run(recipe, folder, progress=setup.progress_of_run(), judge="selection")
    finished = open_run(folder)
    return setup.metric_of(finished, list(finished.variants)[-1])
