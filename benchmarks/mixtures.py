"""What int8 and int4 experts cost a mixture in perplexity, and how much of its work they do: a Mixtral and a Qwen2-MoE.

    python benchmarks/mixtures.py [--kinds mixtral qwen2_moe] [--epochs N] [--data PATH] [--out FOLDER]

Trains each mixture on Shakespeare's plays from random weights, quantizes it once in static int8 with int8 tables and once to int4 by GPTQ,
and answers the evaluation split with OpenVINO GenAI from the graph with a cache. The table shows perplexity with the 95 % paired bootstrap
interval of its change (blocks are drawn), the share of the weights that the engine's files hold as integers, and the shares of the weight
products that the engine itself reports in int8 and with int4 weights. Tables are int8 weights by which floats are multiplied: they count
for the first share alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from compress.pipeline import run
from compress.recipe import check
from foundation.core.progress import ConsoleProgress

SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {**SIZES, "intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **SIZES,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
}
QUANTIZED: dict[str, dict[str, Any]] = {
    "int8": {"scheme": "w8a8", "embeddings": True},
    "int4": {"scheme": "w4a16", "rounding": "gptq", "group_size": 64, "embeddings": True},
}


def main() -> None:
    """Trains, quantizes, exports, prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="mixtures; both where absent")
    parser.add_argument("--epochs", type=float, default=6, help="passes over the train split")
    parser.add_argument("--data", default="karpathy/tiny_shakespeare", help="text file or folder, or a Hub id")
    parser.add_argument("--out", type=Path, default=Path("runs/mixtures"), help="where to work")
    arguments = parser.parse_args()
    lines = [line for kind in arguments.kinds for line in _measured(kind, arguments)]
    print(
        "| mixture | engine | perplexity | change, 95 % interval | n | integer weights | int8 products | int4 products |\n"
        + "| --- " * 8
        + "|"
    )
    print("\n".join(lines))


def _measured(kind: str, arguments: argparse.Namespace) -> list[str]:
    """Returns the table rows of one mixture."""
    training = {"epochs": arguments.epochs, "batch_size": 16, "learning_rate": 2e-3, "schedule": "cosine", "weight_decay": 0.1}
    quantized = [{"quantize": {"id": name, "input": "baseline", **settings}} for name, settings in QUANTIZED.items()]
    recipe = check(
        {
            "name": f"mixture-{kind}",
            "model": {"config": {"model_type": kind, **KINDS[kind]}, "init": "random", "task": "text-generation"},
            "tokenizer": {"train": "bpe", "vocab_size": 2048},
            "data": {"path": arguments.data, "columns": {"text": "text"}, "max_length": 128},
            "goals": {},
            "target": {"engines": ["openvino_genai"], "batch_sizes": [1], "sequence_lengths": [32]},
            "stages": [{"finetune": training}, *quantized, {"export": {"variants": "all", "generation": {"prompts": 50}}}],
        }
    )
    outcome = run(recipe, arguments.out / kind, progress=ConsoleProgress())
    rows = []
    for variant in outcome.report["variants"]:
        found, drop = variant["accuracy"]["openvino_genai"], (variant.get("drops") or {}).get("openvino_genai")
        change = f"{drop['difference']:+.2%} ({drop['low']:+.2%} to {drop['high']:+.2%})" if drop else ""
        shares = f"{variant['integer_weights']:.4f} | {variant['int8_share'] or 0:.4f} | {variant['int4_share'] or 0:.4f}"
        rows.append(f"| {kind} | {variant['id']} | {found['value']:.3f} | {change} | {found['n']:,} | {shares} |")
    return rows


if __name__ == "__main__":
    main()
