"""What bias correction does to int8 in torch: distances to fp32 with and without it, whether or not the stage would keep it.

    python benchmarks/bias_correction.py --model FOLDER --data FOLDER [--rows N] [--seeds N ...] [--set KEY=VALUE ...]

The first FOLDER holds MiniLM fine-tuned on SST-2, the second the SST-2 files that recipes/sst2-minilm-ptq-2693.yaml names. For each seed
the calibration rows are drawn anew. Prints, over N rows of the selection split, agreement of the predictions with fp32, the KL divergence
from it, and the mean absolute difference of the logits.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from compress.recipe import read
from compress.run.prepare import prepare
from foundation.core.progress import ConsoleProgress
from foundation.measure.closeness import spread
from foundation.measure.predictions import compared
from foundation.models.importing import import_model
from foundation.stage.context import Context
from quantize.bias_correction import correct_biases
from quantize.quantize import Quantize
from quantize.schemes import choose_scales
from quantize.steps import Steps
from quantize.trial import distance, in_int8

ROOT = Path(__file__).resolve().parent.parent
BATCH_SIZE = 32
SETTINGS = {"percentile 99.99, no smoothing": {"smoothquant": False}, "min-max, smoothing (default)": {}}


def main() -> None:
    """Quantizes with each setting, measures before and after the correction, prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="fine-tuned MiniLM")
    parser.add_argument("--data", type=Path, required=True, help="SST-2 folder")
    parser.add_argument("--rows", type=int, default=1000, help="selection rows to measure on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the calibration rows")
    parser.add_argument("--set", action="append", default=[], help="key.path=value, as for compress run")
    arguments = parser.parse_args()
    paths = [f"model.path={arguments.model}", f"data.path={arguments.data}", *arguments.set]
    recipe = read(ROOT / "recipes" / "sst2-minilm-ptq-2693.yaml", paths)
    print("| settings of `quantize` | seed | bias correction | agreement | KL, nats | mean abs. logit difference |\n" + "| --- " * 6 + "|")
    with tempfile.TemporaryDirectory() as folder:
        context = prepare(recipe, Path(folder), ConsoleProgress("quiet"))
        source = Path(folder) / "model"
        source.mkdir()
        import_model(recipe.model, context.data.labels, context.seed, source)
        for name, keys in SETTINGS.items():
            for seed in arguments.seeds:
                for line in measured(
                    Quantize(**keys, weight_bits=8, bias_correction=True), source, replace(context, seed=seed), arguments.rows
                ):
                    print(f"| {name} | {seed} | {line} |", flush=True)


def measured(stage: Quantize, source: Path, context: Context, count: int) -> list[str]:
    """Returns the figures of one setting without and with bias correction."""
    steps = Steps.prepare(stage, source, context)
    layers, _ = steps.choose_layers()
    rows, prepared = spread(context.data.selection.rows, count), context.preprocessor(source)
    floating = compared(steps.model, prepared, rows, BATCH_SIZE)
    smoothed, _ = steps.equalize_and_smooth(layers)
    observed = steps.observe(layers, smoothed)
    weights, _ = steps.weights(layers, smoothed, observed)
    method, _ = steps.calibrator(lambda _: {}, layers)
    scales = choose_scales(stage.scheme, weights, smoothed, observed, steps.bits, stage.group_size, stage.calibration.percentile, method)
    lines = []
    for corrected in ("no", "yes"):
        if corrected == "yes":
            correct_biases(steps.model, layers, scales, observed.group, lambda: steps.feed(""), lambda model, batch: model(**batch))
        with in_int8(steps.model, layers, scales):
            logits = compared(steps.model, prepared, rows, BATCH_SIZE)
        agreement, apart = (logits.argmax(1) == floating.argmax(1)).mean(), distance(context.task, floating, logits)
        lines.append(f"{corrected} | {agreement:.3f} | {apart:.5f} | {np.abs(logits - floating).mean():.3f}")
    return lines


if __name__ == "__main__":
    main()
