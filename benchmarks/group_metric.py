"""What makes a group of weights small: accuracy without the smallest groups, before any training.

    python benchmarks/group_metric.py --model FOLDER --data FOLDER [--sparsities X ...] [--set KEY=VALUE ...]

The first FOLDER holds MiniLM fine-tuned on SST-2, the second the SST-2 files that recipes/sst2-minilm-ptq-2693.yaml names. Groups are
ranked by the norm of their weights, or by that of their weights in the metric of the loss (prune/sparsify/curvature.py, 1,024 calibration
rows), within each layer or over all layers. Accuracy in torch over the evaluation split.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from compress.recipe import read
from compress.run.prepare import prepare
from foundation.core.progress import ConsoleProgress
from foundation.measure.predictions import compared
from foundation.models.checkpoint import load
from foundation.models.importing import import_model
from prune.calibration import calibration_batches
from prune.sparsify.curvature import curvatures, in_metric, metrics
from prune.sparsify.lasso import layer_mask, model_masks
from prune.sparsify.patterns import Blocks
from prune.sparsify.settings import SparsifySettings
from prune.sparsify.target_layers import target_layers

ROOT = Path(__file__).resolve().parent.parent
BATCH_SIZE = 32
ROWS = 1024
SHAPES = (Blocks(1, 16), Blocks(1, 64), Blocks(64, 1))


def main() -> None:
    """Ranks, zeroes, evaluates; prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="fine-tuned MiniLM")
    parser.add_argument("--data", type=Path, required=True, help="SST-2 folder")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.8], help="shares of the weights to zero")
    parser.add_argument("--set", action="append", default=[], help="key.path=value, as for compress run")
    arguments = parser.parse_args()
    paths = [f"model.path={arguments.model}", f"data.path={arguments.data}", *arguments.set]
    recipe = read(ROOT / "recipes" / "sst2-minilm-ptq-2693.yaml", paths)
    print("| group | zeros | metric | each layer | all layers together |\n" + "| --- " * 5 + "|")
    with tempfile.TemporaryDirectory() as folder:
        context = prepare(recipe, Path(folder), ConsoleProgress("quiet"))
        source = Path(folder) / "model"
        source.mkdir()
        import_model(recipe.model, context.data.labels, context.seed, source)
        model, evaluation, prepared = load(source), context.data.evaluation, context.preprocessor(source)
        layers = target_layers(SparsifySettings(method="magnitude"), model)
        weights = {name: layer.weight.detach().clone() for name, layer in layers.items()}
        batches = calibration_batches(model, source, ROWS, context, "")
        found = metrics(weights, curvatures(model, layers, batches, context.task, context.seed))

        def accuracy(masks: Mapping[str, Tensor]) -> float:
            with torch.no_grad():
                for name, layer in layers.items():
                    layer.weight.copy_(weights[name] * masks[name])
            return float((compared(model, prepared, evaluation.rows, BATCH_SIZE).argmax(1) == evaluation.labels.array).mean())

        seen = {"weights": weights, "curvature": {name: in_metric(weight_OI, found[name]) for name, weight_OI in weights.items()}}
        for sparsity in arguments.sparsities:
            for shape in SHAPES:
                for name, values in seen.items():
                    alone = {layer: layer_mask(value_OI, (shape,), sparsity) for layer, value_OI in values.items()}
                    cells = " | ".join(f"{accuracy(masks):.4f}" for masks in (alone, model_masks(values, (shape,), sparsity)))
                    print(f"| {shape.rows} x {shape.columns} | {sparsity:.0%} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
