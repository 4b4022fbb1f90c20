"""What rotating the residual stream does for a language model in int8 and int4: perplexity without, with Hadamard matrices, and learned.

    python benchmarks/decoding/rotation.py FOLDER TEXT [--methods NAME ...] [--set KEY=VALUE ...] [--out FOLDER]

FOLDER holds the checkpoint of a language model, TEXT a text for calibration and one for evaluation, as for `data.path`. Each method
quantizes the same checkpoint. Perplexity is measured in torch over the whole evaluation split, with the 95 % paired bootstrap interval of
its increase over fp32 (blocks are drawn), and the CPU time of the run. A finished stage is never computed again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from compress.pipeline import run
from compress.recipe import check
from compress.report.intervals import paired_bootstrap
from foundation.artifacts.run_folder import open_run
from foundation.core.progress import ConsoleProgress
from foundation.labels.next_token import perplexity
from foundation.machine.environment import fingerprint
from foundation.measure.answers import load_predictions
from foundation.measure.metrics import Metric

INT4 = {"scheme": "w4a8-block", "group_size": 32, "symmetric": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "w8a8": {"scheme": "w8a8", "smoothquant": False},
    "w8a8, SmoothQuant": {"scheme": "w8a8"},
    "w8a8-dynamic": {"scheme": "w8a8-dynamic", "smoothquant": False},
    "w8a8-dynamic, SmoothQuant": {"scheme": "w8a8-dynamic"},
    "w4a8-block, nearest": INT4,
    "w4a8-block, GPTQ": {**INT4, "rounding": "gptq"},
}
METHODS = {
    f"{name}{how}": {**settings, **rotation}
    for name, settings in SETTINGS.items()
    for how, rotation in (("", {}), (", rotated", {"rotation": "hadamard"}), (", learned", {"rotation": "learned"}))
}


def main() -> None:
    """Quantizes every way, prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="checkpoint of a language model")
    parser.add_argument("text", type=Path, help="folder with train.txt and test.txt, or another data.path")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="rows of the table; all where absent")
    parser.add_argument("--set", action="append", default=[], help="key.path=value, as for compress run")
    parser.add_argument("--out", type=Path, default=Path("runs/rotation"), help="where to work")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.methods:
        stage = {"calibration": {"rows": 64}, "weight_bits": 8, **METHODS[name]}
        if stage["scheme"] == "w4a8-block":
            del stage["weight_bits"]
        document = {
            "name": "rotation",
            "model": {"path": str(arguments.folder), "task": "text-generation"},
            "data": {"path": str(arguments.text), "columns": {"text": "text"}, "max_length": 128},
            "target": {"engines": ["onnxruntime_decoder"], "batch_sizes": [1], "sequence_lengths": [128]},
            "stages": [{"quantize": stage}],
        }
        recipe = check(document, arguments.set)
        started = time.process_time()
        finished = open_run(run(recipe, arguments.out, progress=ConsoleProgress()).folder)
        seconds = time.process_time() - started
        answers = {}
        for variant in ("baseline", "quantize"):
            answers[variant], labels = load_predictions(finished.predictions(variant), recipe.model.task)
        before, after = (perplexity(answers[variant], labels.array) for variant in ("baseline", "quantize"))
        low, high = paired_bootstrap(Metric(perplexity), answers["quantize"], answers["baseline"], labels.array, resamples=1000)
        assert low is not None
        assert high is not None
        rows.append(
            {"name": name, "before": before, "perplexity": after, "low": low / before, "high": high / before, "cpu_seconds": seconds}
        )
        increase = f"{after / before - 1:+.1%} ({low / before:+.1%} to {high / before:+.1%})"
        print(f"| {name} | {after:.3f} | {increase} | {seconds:,.0f} s of CPU", flush=True)
    document = {"environment": fingerprint(), "rows": rows}
    (arguments.out / "rotation.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"\nfp32: perplexity {before:.3f}, n = {int((labels.array >= 0).sum())} tokens\n")
    print("| weights | perplexity | increase over fp32, 95 % |\n" + "| --- " * 3 + "|")
    for row in rows:
        increase = f"{row['perplexity'] / row['before'] - 1:+.1%} ({row['low']:+.1%} to {row['high']:+.1%})"
        print(f"| {row['name']} | {row['perplexity']:.3f} | {increase} |")


if __name__ == "__main__":
    main()
