"""A hard case: the same function with outlier channels planted behind every LayerNorm, quantized naively, smoothed, and by `mode: auto`.

    python benchmarks/outliers.py --model FOLDER --data FOLDER [--out FOLDER]

FOLDER holds MiniLM fine-tuned on SST-2, and the SST-2 files that recipes/sst2-minilm-ptq-2693.yaml names. Four channels of what every
LayerNorm gives are moved by 50 (its own outputs are about 1 in size), and the biases of all that reads them take that off again, so that
fp32 answers as before (tests/quantize/outliers.py). Behind a norm after the sum, as BERT has it, a factor cannot be compensated exactly:
the next norm would see it. Prints accuracy in torch and agreement with fp32 over the whole evaluation split.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from compress.evaluate import load_predictions  # noqa: E402
from compress.pipeline import run  # noqa: E402
from compress.progress import ConsoleProgress  # noqa: E402
from compress.recipe import read  # noqa: E402
from compress.run_folder import open_run  # noqa: E402
from tests.quantize.outliers import planted_post_norm_bert  # noqa: E402

SETTINGS = {
    "min-max, no smoothing": "{mode: ptq, smoothquant: false, calibration: {method: minmax}}",
    "percentile 99.99, no smoothing": "{mode: ptq, smoothquant: false}",
    "smoothquant: true (default)": "{mode: ptq}",
    "mode: auto": "{mode: auto}",
}


def main() -> None:
    """Plants the outliers, quantizes, prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="fine-tuned checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="SST-2 folder")
    parser.add_argument("--out", type=Path, default=Path("runs/outliers"), help="where to work")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    hard = arguments.out / "planted"
    if not hard.exists():
        planted_post_norm_bert(arguments.model, hard)
    lines: list[str] = []
    for name, settings in SETTINGS.items():
        recipe = read(
            ROOT / "recipes" / "sst2-minilm-ptq-2693.yaml",
            [f"model.path={hard}", f"data.path={arguments.data}", f"stages=[{{quantize: {settings}}}]", "goals={max_drop: 0.005}"],
        )
        finished = open_run(run(recipe, arguments.out / "run", progress=ConsoleProgress()).folder)
        logits = {}
        for variant in ("baseline", "quantize"):
            evaluated = finished.artifacts[f"evaluate-{variant}"]
            logits[variant], labels = load_predictions(evaluated.path / evaluated.metrics["predictions"])
        answers = {variant: values.argmax(axis=1) for variant, values in logits.items()}
        if not lines:
            lines.append(f"| fp32 | {(answers['baseline'] == labels).mean():.4f} | 1.0000 |  |")
        attempts = finished.artifacts["quantize"].metrics.get("attempts", [])
        kept = next((f"took {attempt['name']}" for attempt in attempts if attempt["kept"]), "")
        accuracy, agreement = (answers["quantize"] == labels).mean(), (answers["quantize"] == answers["baseline"]).mean()
        lines.append(f"| {name} | {accuracy:.4f} | {agreement:.4f} | {kept} |")
    print("| quantize | accuracy | agreement with fp32 | |\n| --- | --- | --- | --- |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
