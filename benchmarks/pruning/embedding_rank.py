"""Size and accuracy of a model whose embeddings have a lower rank, before any training.

    python benchmarks/pruning/embedding_rank.py [--recipe RECIPE] [--set KEY=VALUE ...] [--ranks 64 96 128 192] [--out FOLDER]

RECIPE names model and data, by default MiniLM and SST-2 (recipes/sst2-minilm-ptq-2693.yaml: give `--set model.path=FOLDER --set
data.path=FOLDER`). The model gets embeddings of each rank twice: fitted to the tokens by how often they occur in the train rows, as the
stage `prune` does, and to all tokens alike. Prints for each the relative error of the embeddings over the tokens of the evaluation rows,
the primary metric over the evaluation split in torch, how many predictions are not the model's, the parameters, and the bytes of the
weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.recipe import Recipe, read
from compress.run.prepare import prepare
from foundation.core.progress import ConsoleProgress
from foundation.labels.tasks import TASKS
from foundation.machine.environment import fingerprint
from foundation.measure.metrics import metrics
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load, save
from foundation.models.importing import import_model
from foundation.models.inputs.tokenizer import resolve_tokenizer
from foundation.models.layers.low_rank_embedding import words_of
from foundation.stage.context import Context
from prune.embeddings.low_rank import in_low_rank, occurrences

ROOT = Path(__file__).resolve().parents[2]
BATCH = 64
COLUMNS = ("embeddings", "relative error", "metric", "predictions that differ", "parameters", "model.safetensors, bytes")


def main() -> None:
    """Fits the ranks, asks the models, prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "sst2-minilm-ptq-2693.yaml", help="model and data")
    parser.add_argument("--set", action="append", default=[], help="key.path=value, as for compress run")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 96, 128, 192], help="ranks of the embeddings")
    parser.add_argument("--out", type=Path, default=Path("runs/embedding-rank"), help="where to work")
    arguments = parser.parse_args()
    recipe = read(arguments.recipe, arguments.set)
    rows = measured(recipe, arguments.ranks, arguments.out)
    document = {"environment": fingerprint(), "rows": rows}
    (arguments.out / "embedding-rank.json").write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
    print(f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|")
    for row in rows:
        print(f"| {row['name']} | {row['error']:.1%} | {row['metric']:.4f} | {row['differ']} | {row['parameters']:,} | {row['bytes']:,} |")
    print(json.dumps(fingerprint(), default=str))


def measured(recipe: Recipe, ranks: list[int], out: Path) -> list[dict[str, Any]]:
    """Returns a row for the model and one for each rank and kind of weights."""
    context = prepare(recipe, out / "run", ConsoleProgress())
    source = out / "baseline"
    if not source.is_dir():
        source.mkdir(parents=True)
        tokenizer = resolve_tokenizer(recipe.tokenizer, context.data.tokenizer)
        import_model(recipe.model, context.data.labels, context.seed, source, tokenizer)
    model: Any = load(source)
    prepared, tokens = context.preprocessor(source), model.config.vocab_size
    often, read_V = (occurrences(split.rows, prepared, tokens) for split in (context.data.train, context.data.evaluation))
    before = predict(model, prepared, context.data.evaluation.rows, BATCH)
    rows = [row("whole", model, model, source, context, before, before, read_V)]
    for rank in ranks:
        for name, counts_V in (("by occurrence", often), ("alike", torch.zeros_like(often))):
            small, _ = in_low_rank(model, counts_V, rank, "benchmark")
            folder = out / f"{rank}-{name.replace(' ', '-')}"
            folder.mkdir(exist_ok=True)
            save(small, source, folder, f"Embeddings of rank {rank}")
            after = predict(small, prepared, context.data.evaluation.rows, BATCH)
            rows.append(row(f"rank {rank}, {name}", model, small, folder, context, before, after, read_V))
            print(rows[-1], flush=True)
    return rows


def row(
    name: str, model: nn.Module, small: nn.Module, folder: Path, context: Context, before: Any, after: Any, read_V: Tensor
) -> dict[str, Any]:
    """Returns the figures of a model; `before` and `after` are the answers of the whole one and its own, `read_V` counts the tokens of
    the evaluation rows."""
    whole_VD, own_VD = (table_of(one) for one in (model, small))
    error = float((read_V @ (whole_VD - own_VD).square().sum(1)) / (read_V @ whole_VD.square().sum(1))) ** 0.5
    row = TASKS[context.task]
    return {
        "name": name,
        "error": error,
        "metric": metrics(context.task, after, context.data.evaluation.labels)[row.metric],
        "differ": int(row.answer.differences(before, after)[0].sum()),
        "parameters": sum(parameter.numel() for parameter in small.parameters()),
        "bytes": (folder / "model.safetensors").stat().st_size,
    }


def table_of(model: nn.Module) -> Tensor:
    """Returns the embeddings of all tokens, float64 [V, D]."""
    words: Any = words_of(model)
    with torch.no_grad():
        table_VD: Tensor = words(torch.arange(words.num_embeddings)).double()
    return table_VD


if __name__ == "__main__":
    main()
