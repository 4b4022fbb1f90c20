"""The latency table: milliseconds of one block by its heads and FFN neurons, on one engine at one input shape.

T(d; h, f) is the latency of a model of d equal blocks with h head groups and f FFN neurons; H and F are the counts of the largest block:

    block(H, F) = (T(d2; H, F) - T(d1; H, F)) / (d2 - d1)              two depths: embeddings, pooler and head cancel out
    rest        = T(d2; H, F) - d2 block(H, F)
    block(h, F), block(H, f)  =  (T(d2; ...) - rest) / d2              on a coarse grid of counts each
    block(h, f) = block(h, F) + block(H, f) - block(H, F)              attention and FFN add up
    latency     = rest + sum over blocks of block(h, f)

Latency is interpolated linearly between grid points. Isotonic regression removes noise that would make a smaller part slower. A table of
measured latencies by structure: Kurtic et al. 2023, https://arxiv.org/abs/2302.04089, section 3.2. Limitations: attention and FFN are
measured separately, so the table misses cache effects of blocks that are small in both; the pruned shape is measured, and the budget
corrected (`prune.latency.budget`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.models.structure import Sizes

DEPTHS = (2, 6)
POINTS = 6
"""Most points of each grid."""
Point = tuple[int, int, int]
"""Depth, head groups, FFN neurons."""


@dataclass(frozen=True)
class Curve:
    """Milliseconds by count: linear between the points, constant beyond them."""

    counts: tuple[int, ...]
    """Ascending."""
    ms: tuple[float, ...]
    """Non-decreasing."""

    @classmethod
    def of(cls, counts: Sequence[int], ms: Sequence[float]) -> Curve:
        """Returns the non-decreasing least-squares fit of the measurements, shifted to 0 ms at its first point."""
        from scipy.optimize import isotonic_regression

        rising = isotonic_regression(ms).x
        return cls(tuple(counts), tuple(float(value - rising[0]) for value in rising))

    def at(self, count: float) -> float:
        """Returns the milliseconds at a count."""
        return float(np.interp(count, self.counts, self.ms))

    def expected(self, count: Tensor) -> Tensor:
        """Returns the milliseconds at fractional counts, float32 of the same shape; differentiable inside the grid."""
        counts, ms = (torch.tensor(values, dtype=torch.float32, device=count.device) for values in (self.counts, self.ms))
        if len(counts) == 1:
            return ms[0] + 0 * count
        inside = count.clamp(counts[0], counts[-1])
        left = (torch.searchsorted(counts, inside.detach(), right=True) - 1).clamp(0, len(counts) - 2)
        slope = (ms[left + 1] - ms[left]) / (counts[left + 1] - counts[left])
        return ms[left] + slope * (inside - counts[left])


@dataclass(frozen=True)
class LatencyTable:
    """The latency model of one architecture, fitted to measurements, in milliseconds."""

    rest_ms: float
    """Embeddings, pooler and head."""
    block_ms: float
    """One block with the fewest heads and neurons of the grid."""
    heads: Curve
    """Milliseconds that additional head groups add to it."""
    ffn: Curve
    """Milliseconds that additional FFN neurons add to it."""

    @classmethod
    def of(cls, measured: Mapping[Point, float], heads: Sequence[int], ffn: Sequence[int]) -> LatencyTable:
        """Fits the table to measurements.

        Args:
            measured: Milliseconds of every point of `points`.
            heads: Grid of head groups, ascending; the last is H.
            ffn: Grid of FFN neurons, ascending; the last is F.
        """
        few, many = DEPTHS
        most_heads, most_ffn = heads[-1], ffn[-1]
        slope = (measured[many, most_heads, most_ffn] - measured[few, most_heads, most_ffn]) / (many - few)
        whole = min(max(0.0, slope), measured[many, most_heads, most_ffn] / many)  # noise must make neither part negative
        rest = measured[many, most_heads, most_ffn] - many * whole
        of_heads = Curve.of(heads, [(measured[many, count, most_ffn] - rest) / many for count in heads])
        of_ffn = Curve.of(ffn, [(measured[many, most_heads, count] - rest) / many for count in ffn])
        return cls(rest, max(0.0, whole - of_heads.ms[-1] - of_ffn.ms[-1]), of_heads, of_ffn)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> LatencyTable:
        """Reads a table that `as_json` wrote."""
        curves = {name: Curve(tuple(values[name]["counts"]), tuple(values[name]["ms"])) for name in ("heads", "ffn")}
        return cls(values["rest_ms"], values["block_ms"], **curves)

    def as_json(self) -> dict[str, Any]:
        """Returns the table as JSON types."""
        plain = asdict(self)
        return {**plain, **{name: {key: list(values) for key, values in plain[name].items()} for name in ("heads", "ffn")}}

    def block(self, heads: float, ffn: float) -> float:
        """Returns the predicted milliseconds of one block."""
        return self.block_ms + self.heads.at(heads) + self.ffn.at(ffn)

    def predict(self, sizes: Sizes) -> float:
        """Returns the predicted milliseconds of a model."""
        return self.rest_ms + sum(map(self.block, sizes.key_value_heads, sizes.ffn))


def grid(most: int, step: int) -> tuple[int, ...]:
    """Returns up to `POINTS` roughly evenly spaced counts, ascending: multiples of `step`, and `most` as the last."""
    allowed = sorted({most, *range(min(step, most), most, step)})
    places = np.linspace(0, len(allowed) - 1, min(POINTS, len(allowed)))
    return tuple(dict.fromkeys(allowed[round(float(place))] for place in places))


def points(heads: Sequence[int], ffn: Sequence[int]) -> list[Point]:
    """Returns the points to measure, largest first."""
    few, many = DEPTHS
    whole = [(many, heads[-1], ffn[-1]), (few, heads[-1], ffn[-1])]
    return [*whole, *((many, count, ffn[-1]) for count in heads[:-1]), *((many, heads[-1], count) for count in ffn[:-1])]
