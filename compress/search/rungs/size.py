"""Rung 1: multiply-accumulates and size, predicted from the shapes; reads no weights.

A candidate is dropped where its model cannot be made, and where a goal limits the size and the weights alone exceed it. The rest is kept
for later rungs: multiply-accumulates stand for the latency where that is not timed. Left out: a limit of multiply-accumulates by the
latency that a goal asks for, as how fast a processor does them depends on the shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compress.run.disk import Variant, weight_bytes
from compress.search.candidate import Candidate, Record
from compress.search.price import Price
from compress.search.rungs.rung import Rung, Verdict
from compress.search.setup import Setup


class PredictedSize(Rung):
    """Predicts; see above."""

    NAME: ClassVar[str] = "size"
    ABOUT: ClassVar[str] = "predicted multiply-accumulates and size"

    def measure(self, candidate: Candidate, setup: Setup) -> Record:
        """Returns `macs` and `parameters` of the last model, `weight_bytes`, and the price of the whole run: `predicted_seconds` (null
        where a step is unknown)."""
        recipe = self.recipe(candidate, setup)
        context = setup.context_of(recipe)
        context.count_macs()  # lets every stage check the model that it would get
        steps = setup.forecast(recipe)
        last = next(step for step in reversed(steps) if step.size is not None)
        assert last.size is not None
        return Record(
            macs=last.size.macs,
            parameters=last.size.parameters,
            weight_bytes=weight_bytes(Variant(last.config, last.lineage), context),
            predicted_seconds=Price.of(steps).whole_seconds,
        )

    def verdicts(self, wave: Sequence[Candidate], setup: Setup) -> dict[int, Verdict]:
        """Drops what exceeds the limit of the size."""
        limit = setup.recipe.goals.max_size_mb
        if limit is None:
            return {}
        sizes = {one.number: one.records[self.NAME]["weight_bytes"] / 1e6 for one in wave}
        return {
            number: Verdict(f"its weights alone take {size:.2f} MB; goals.max_size_mb is {limit:g}", {"max_size_mb": size / limit - 1})
            for number, size in sizes.items()
            if size > limit
        }
