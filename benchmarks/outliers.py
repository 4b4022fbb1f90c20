"""A hard case: the same function with outlier channels planted behind every LayerNorm, quantized naively, smoothed, and by `mode: auto`.

    python benchmarks/outliers.py --model FOLDER --data FOLDER [--vit FOLDER --images FOLDER] [--out FOLDER]

The first FOLDER holds MiniLM fine-tuned on SST-2, the second the SST-2 files that recipes/sst2-minilm-ptq-2693.yaml names. Four channels
of what every LayerNorm gives become 50 times as large, and all that reads them takes it off again, so that fp32 answers as before
(tests/quantize/outliers.py). In a ViT (fine-tuned by recipes/cifar10-vit.yaml, with the files of CIFAR-10) that is a factor in the norm,
and its inverse in the weights of the layers behind. Behind a norm after the sum, as BERT has it, no factor can be compensated exactly: the
next norm would see it. There it is an offset of the same size, which biases take off. Prints accuracy in torch and agreement with fp32
over the whole evaluation split.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from compress.pipeline import run  # noqa: E402
from compress.recipe import read  # noqa: E402
from foundation.artifacts.run_folder import open_run  # noqa: E402
from foundation.core.progress import ConsoleProgress  # noqa: E402
from foundation.measure.answers import load_predictions  # noqa: E402
from tests.quantize.outliers import planted_post_norm_bert, planted_vit  # noqa: E402

SETTINGS = {
    "min-max, no smoothing": "{mode: ptq, smoothquant: false, calibration: {method: minmax}}",
    "percentile 99.99, no smoothing": "{mode: ptq, smoothquant: false}",
    "smoothquant: true (default)": "{mode: ptq}",
    "mode: auto": "{mode: auto}",
}


def main() -> None:
    """Plants the outliers, quantizes, prints a Markdown table."""
    arguments = parse()
    cases = [("MiniLM", "sst2-minilm-ptq-2693", planted_post_norm_bert, arguments.model, [f"data.path={arguments.data}"])]
    if arguments.vit is not None:
        files = "data.files={train: subset_train.tar.gz, test: subset_test.tar.gz}"
        cases.append(
            (
                "ViT",
                "cifar10-vit",
                planted_vit,
                arguments.vit,
                [f"data.path={arguments.images}", files, "model.config=null", "model.init=null", "model.head=keep"],
            )
        )
    lines = []
    for name, recipe, plant, source, settings in cases:
        hard = arguments.out / name.lower()
        if not hard.exists():
            hard.parent.mkdir(parents=True, exist_ok=True)
            plant(source, hard)
        lines += measured(name, ROOT / "recipes" / f"{recipe}.yaml", [f"model.path={hard}", *settings], arguments.out / "run")
    print("| model | quantize | accuracy | kept | agreement with fp32 | n | |\n" + "| --- " * 7 + "|")
    print("\n".join(lines))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="fine-tuned MiniLM")
    parser.add_argument("--data", type=Path, required=True, help="SST-2 folder")
    parser.add_argument("--vit", type=Path, help="fine-tuned ViT; left out where absent")
    parser.add_argument("--images", type=Path, help="CIFAR-10 folder")
    parser.add_argument("--out", type=Path, default=Path("runs/outliers"), help="where to work")
    return parser.parse_args()


def measured(name: str, recipe: Path, settings: list[str], out: Path) -> list[str]:
    """Quantizes one planted model every way; returns the lines of the table."""
    lines = []
    for method, quantize in SETTINGS.items():
        asked = read(recipe, [*settings, f"stages=[{{quantize: {quantize}}}]", "goals={max_drop: 0.005}"])
        finished = open_run(run(asked, out, progress=ConsoleProgress()).folder)
        answers = {}
        for variant in ("baseline", "quantize"):
            logits, labels = load_predictions(finished.predictions(variant), asked.model.task)
            answers[variant] = logits.argmax(axis=1)
        floating, accuracy = ((answers[variant] == labels.array).mean() for variant in ("baseline", "quantize"))
        if not lines:
            lines.append(f"| {name} | fp32 | {floating:.4f} | 100.00% | 1.0000 | {len(labels)} | |")
        attempts = finished.artifacts["quantize"].metrics.get("attempts", [])
        kept = next((f"took {attempt['name']}" for attempt in attempts if attempt["kept"]), "")
        agreement = (answers["quantize"] == answers["baseline"]).mean()
        lines.append(f"| {name} | {method} | {accuracy:.4f} | {accuracy / floating:.2%} | {agreement:.4f} | {len(labels)} | {kept} |")
    return lines


if __name__ == "__main__":
    main()
