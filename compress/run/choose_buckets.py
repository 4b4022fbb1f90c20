"""The step `buckets`, before the export, where the recipe says `target.buckets: auto`: chooses the lengths that rows are padded to.

It measures the model in the first engine of the target at a few lengths, in the largest batch, and takes the buckets with the least total
time for the lengths of the evaluation rows (`compress.run.buckets`). Their labels are not read, and accuracy does not depend on padding.
Evaluation rows resemble served rows more than training rows do: SST-2 trains on phrases and serves sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np

from compress.run.buckets import choose, measured_at, most_buckets
from foundation.artifacts.artifact import Artifact, Kind, write_json
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from foundation.stage.stage import Stage

RESULTS = "buckets.json"


class Buckets(Stage):
    """Chooses the lengths that rows are padded to."""

    NAME: ClassVar[str] = "buckets"
    PRODUCES: ClassVar[Kind] = "buckets"
    VERSION: ClassVar[int] = 2

    quantized: bool
    """Whether the model is measured in int8."""

    def run(self, parent: Artifact, context: Context, out: Path) -> Mapping[str, object]:
        """Writes `buckets.json`.

        Returns:
            `buckets`: the lengths, ascending, max_length last.
        """
        assert context.measure_latency is not None, "a run has a timer"
        name, checkpoint = [(name, made) for name, made in context.checkpoints.items() if Checkpoint(made.path).scheme is None][-1]
        batch, lengths = max(context.target.batch_sizes), measured_at(context.max_length)
        times = context.measure_latency.at(checkpoint.path, [(batch, length) for length in lengths], "int8" if self.quantized else "fp32")
        measured = {length: time / batch for length, time in zip(lengths, times, strict=True)}
        rows = [tokens.shape[1] for tokens in context.preprocessor(checkpoint.path).divided(context.data.evaluation.rows)[1]]
        size = sum(file.stat().st_size for file in checkpoint.path.glob("*.safetensors"))
        most = most_buckets(round(context.target.bucket_memory_mb * 1e6), size, sorted({1, *context.target.batch_sizes}))
        found = choose(rows, measured, context.max_length, most)
        context.progress.log(
            f"  buckets: {', '.join(map(str, found.buckets))} for rows of {np.mean(rows):.1f} tokens (mean): {found.cost:.3f} ms a row in "
            f"{name}, {found.costs[0]:.3f} padded to {context.max_length}"
        )
        percentiles = zip(("p50", "p90", "p99", "max"), np.percentile(rows, (50, 90, 99, 100)).tolist(), strict=True)
        tokens = {"mean": float(np.mean(rows)), **dict(percentiles)}
        results = {"buckets": list(found.buckets), "cost_ms": found.cost, "costs_ms": list(found.costs), "most": most}
        write_json(out / RESULTS, {**results, "batch": batch, "measured_ms": measured, "tokens": tokens})
        return {"buckets": list(found.buckets)}
