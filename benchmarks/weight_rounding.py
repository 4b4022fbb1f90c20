"""What each way of rounding weights costs a language model in perplexity: int4 and int8, nearest, AWQ, GPTQ, AdaRound and AutoRound.

    python benchmarks/weight_rounding.py [--recipe NAME] [--epochs N] [--data PATH] [--set KEY=VALUE ...]
        [--methods NAME ...] [--out FOLDER]
    python benchmarks/weight_rounding.py --model FOLDER --data TEXT [--calibration N] [--steps N --batch-size N] [--methods NAME ...]

Trains the GPT of recipes/NAME.yaml once (tinyshakespeare-gpt where absent), or takes a checkpoint as it is and reads blocks of 128 tokens
of the train and test text in a folder. Quantizes that one model every way, and measures perplexity in torch over the whole evaluation
split, with the 95 % paired bootstrap interval of the increase over fp32 (blocks are drawn). A small model that has learned some of its text
by heart may gain by noise, so that perplexity alone does not tell which rounding is closer: beside it stand the share of tokens for which
the likeliest one is that of fp32, and how far the log-likelihood of the true token moves.
A finished stage is never computed again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import yaml

from compress.pipeline import run
from compress.recipe import Recipe, check, read
from compress.report.intervals import paired_bootstrap
from foundation.artifacts.run_folder import open_run
from foundation.core.progress import ConsoleProgress
from foundation.labels.next_token import perplexity
from foundation.machine.environment import fingerprint
from foundation.measure.answers import load_predictions
from foundation.measure.metrics import Metric

ROOT = Path(__file__).resolve().parent.parent
METHODS = {
    "w4a16, nearest": "{scheme: w4a16, group_range: weights}",
    "w4a16, AWQ": "{scheme: w4a16, awq: true}",
    "w4a16, GPTQ": "{scheme: w4a16, rounding: gptq}",
    "w4a16, AWQ and GPTQ": "{scheme: w4a16, awq: true, rounding: gptq}",
    "w4a16, AdaRound": "{scheme: w4a16, rounding: adaround}",
    "w4a16, groups of 32, nearest": "{scheme: w4a16, group_size: 32, group_range: weights}",
    "w4a16, groups of 32, GPTQ": "{scheme: w4a16, group_size: 32, rounding: gptq}",
    **{
        f"w4a16, groups of {size}, zero points, {name}": f"{{scheme: w4a16, group_size: {size}, symmetric: false, {settings}}}"
        for size in (32, 64)
        for name, settings in {
            "nearest, range minmax": "group_range: minmax",
            "nearest, range by weights": "group_range: weights",
            "nearest, range by outputs": "group_range: outputs",
            "GPTQ, range by weights": "rounding: gptq, group_range: weights",
            "GPTQ, range by outputs": "rounding: gptq, group_range: outputs",
            "AutoRound, range by weights": "rounding: autoround, group_range: weights",
            "AutoRound, range by outputs": "rounding: autoround, group_range: outputs",
        }.items()
    },
    **{
        f"w4a16, groups of 32, {scales}{turned}, {rounding}": "{scheme: w4a16, group_size: 32, symmetric: false, group_scales: "
        f"{kind}, rotation: {rotation}, group_range: weights, rounding: {rounding.lower()}, stream: true}}"
        for scales, kind in {"float scales": "float", "two-level scales": "two_level", "K-quants": "k_quant"}.items()
        for turned, rotation in {"": "none", ", rotated": "hadamard"}.items()
        for rounding in ("nearest", "GPTQ")
    },
    "w8a8, nearest": "{scheme: w8a8}",
    "w8a8, GPTQ": "{scheme: w8a8, rounding: gptq}",
    "w8a8-dynamic, nearest": "{scheme: w8a8-dynamic}",
    "fp8": "{scheme: fp8}",
}


def main() -> None:
    """Trains, quantizes every way, prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tinyshakespeare-gpt", help="name of a shipped recipe for text-generation")
    parser.add_argument("--model", type=Path, help="checkpoint of a language model, instead of a recipe")
    parser.add_argument("--calibration", type=int, default=64, help="calibration rows, with --model")
    parser.add_argument("--steps", type=int, default=200, help="steps of AutoRound, with --model")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a step of AutoRound, with --model")
    parser.add_argument("--epochs", type=float, help="passes of its training; those of the recipe where absent")
    parser.add_argument("--data", type=Path, help="text file or folder; the recipe's Hub id where absent")
    parser.add_argument("--set", action="append", default=[], help="key.path=value, as for compress run")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="rows of the table; all where absent")
    parser.add_argument("--out", type=Path, default=Path("runs/weight-rounding"), help="where to work")
    arguments = parser.parse_args()
    title, start = (arguments.model.name, "baseline") if arguments.model else (arguments.recipe, "finetune")
    rows = []
    for name in arguments.methods:
        recipe = _of_model(arguments, METHODS[name]) if arguments.model else _of_recipe(arguments, METHODS[name])
        finished = open_run(run(recipe, arguments.out / title, progress=ConsoleProgress()).folder)
        answers = {}
        for variant in (start, "quantize"):
            answers[variant], labels = load_predictions(finished.predictions(variant), recipe.model.task)
        before, after = (perplexity(answers[variant], labels.array) for variant in (start, "quantize"))
        low, high = paired_bootstrap(Metric(perplexity), answers["quantize"], answers[start], labels.array, resamples=1000)
        changed, moved = recipe.model.facts.answer.differences(answers[start], answers["quantize"])
        bits = finished.artifacts["quantize"].metrics.get("bits_per_weight")
        figures = {"bits": bits, "perplexity": after, "increase": after - before, "low": low, "high": high}
        rows.append({"name": name, **figures, "agreement": 1 - float(changed.mean()), "moved": float(moved.mean()), "n": len(changed)})
    document = {"environment": fingerprint(), "rows": rows}
    (arguments.out / f"{title}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"fp32: perplexity {before:.3f}, n = {rows[0]['n']} tokens\n")
    heads = ("weights", "bits a weight", "perplexity", "increase over fp32, 95 %", "likeliest token as fp32", "mean abs. change of nll")
    print(f"| {' | '.join(heads)} |\n" + "| --- " * len(heads) + "|")
    for row in rows:
        interval = f"{row['increase']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
        bits = "" if row["bits"] is None else f"{row['bits']:.2f}"
        print(f"| {row['name']} | {bits} | {row['perplexity']:.3f} | {interval} | {row['agreement']:.4f} | {row['moved']:.4f} |")


def _of_recipe(arguments: argparse.Namespace, method: str) -> Recipe:
    """Returns a shipped recipe with its training and the quantization."""
    settings = [*arguments.set, *([f"data.path={arguments.data}"] if arguments.data else [])]
    stages = [json.dumps({"finetune": _training(arguments.recipe, arguments.epochs)}), f"{{quantize: {method}}}"]
    return read(ROOT / "recipes" / f"{arguments.recipe}.yaml", [*settings, f"stages=[{', '.join(stages)}]", "goals={}"])


def _of_model(arguments: argparse.Namespace, method: str) -> Recipe:
    """Returns a recipe that quantizes a checkpoint."""
    stage = {**yaml.safe_load(method), "calibration": {"rows": arguments.calibration}}
    if stage.get("rounding") == "autoround":
        stage["autoround"] = {"steps": arguments.steps, "batch_size": arguments.batch_size}
    document = {
        "name": arguments.model.name.lower(),
        "model": {"path": str(arguments.model), "task": "text-generation"},
        "data": {"path": str(arguments.data), "columns": {"text": "text"}, "max_length": 128},
        "stages": [{"quantize": stage}],
    }
    return check(document, arguments.set)


def _training(recipe: str, epochs: float | None) -> dict[str, object]:
    """Returns the settings of the stage `finetune` of a shipped recipe."""
    stage = read(ROOT / "recipes" / f"{recipe}.yaml").stage("finetune")
    return stage.model_dump(mode="json", exclude={"id"}) | ({} if epochs is None else {"epochs": epochs})


if __name__ == "__main__":
    main()
