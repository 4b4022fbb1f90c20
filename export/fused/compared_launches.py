"""Passes of an encoder, recorded with plain and with dependent launches: what `launches.fastest` times.

    answers    of `BATCHES` batches, before and after the times are taken: the first is full, the others have rows of any lengths
    times      of the recording, with the full batch

Both recordings are made as the engine makes them, with measured tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from export.fused.forward import Encoder
from export.fused.graphs import Graphs, Record, Size
from export.fused.launches import KINDS, Launches, Work, differing
from export.fused.layers import Tiles
from export.fused.plan import Plan
from export.fused.rows import Rows, images, pack

BATCHES = 20


class ComparedPass:
    """A pass of one shape.

    Args:
        encoders: An encoder for each kind of launches.
        rows: Rows of a batch.
        length: Tokens of the longest row.
        record: Records a pass.
    """

    def __init__(self, encoders: Mapping[str, Encoder], rows: int, length: int, record: Record) -> None:
        self.shape = f"{rows} x {length}"
        self._size = Size(rows * length, rows)
        self._graphs = {kind: Graphs(encoder.forward, (self._size,), encoder.device, record) for kind, encoder in encoders.items()}
        self._batch = partial(batch, encoders["plain"], rows, length)

    def differs(self) -> str | None:
        """Returns which answers differ, in words; None where all bits are equal."""
        for number in range(BATCHES):
            given = self._batch(number)
            difference = differing(*(self._graphs[kind](given) for kind in KINDS))
            if difference is not None:
                return difference
        return None

    def works(self) -> Mapping[str, Work]:
        """Returns what runs the recording of each kind."""
        return {kind: graphs.loaded(self._batch(0), self._size).replay for kind, graphs in self._graphs.items()}


def passes(
    plan: Plan, device: torch.device, dtype: torch.dtype, shapes: Sequence[tuple[int, int]], tiles: Tiles | None, record: Record
) -> Iterator[ComparedPass]:
    """Yields the pass of each shape.

    Args:
        plan: An encoder.
        device: Where.
        dtype: Type of what is float between the layers.
        shapes: Rows and tokens of a row.
        tiles: Chooses the tiles of dense GEMMs.
        record: Records a pass.
    """
    plan = plan.to(device)
    encoders = {kind: Encoder(replace(plan, launches=Launches(kind == "dependent")), device, dtype, tiles) for kind in KINDS}
    for rows, length in shapes:
        yield ComparedPass(encoders, rows, length, record)


def batch(encoder: Encoder, count: int, length: int, number: int) -> Rows:
    """Returns random rows on the CPU: batch 0 has whole ones, later ones have rows of any lengths; images are always whole."""
    patches, random = encoder.plan.patches, np.random.default_rng(number)
    if patches is not None:
        shape = (patches.channels, patches.height, patches.width)
        return images({"pixel_values": random.normal(size=(count, *shape))}, shape, encoder.plan.longest)
    lengths = random.integers(1, length + 1, count) if number else np.full(count, length)
    ids = random.integers(0, encoder.limits.words, (count, length))
    return pack({"input_ids": ids, "attention_mask": np.arange(length) < lengths[:, None]}, encoder.limits)
