"""The latency table: milliseconds of one block by its heads and FFN neurons, on one engine at one input shape.

T(d; h, f) is the latency of a model of d blocks with h head groups and f FFN neurons; H and F are the counts of the largest block, h1
and f1 the smallest. The last block is measured next to it: engines whose head reads the first token compute little else in it
(`export.graph.unread_tokens`), so that its neurons cost next to nothing.

    block(H, F) = (T(d2; H, F) - T(d1; H, F)) / (d2 - d1)              two depths: embeddings, last block, pooler and head cancel out
    last_h      = what h1 heads in the last block save / what they save in each other block, of 0 to 1; last_f in the same way
    heads(h)    = (T(d2; h, F) - T(d2; h1, F)) / (d2 - 1 + last_h)     on a coarse grid of counts; ffn(f) in the same way
    block(h, f) = heads(h) + ffn(f) + block(H, F) - heads(H) - ffn(F)  attention and FFN add up
    last(h, f)  = block(h, f) - (1 - last_h) heads(h) - (1 - last_f) ffn(f)
    rest        = T(d2; H, F) - (d2 - 1) block(H, F) - last(H, F)
    latency     = rest + sum over blocks of block(h, f), of the last one last(h, f)

Latency is interpolated linearly between grid points. Isotonic regression removes noise that would make a smaller part slower. A table of
measured latencies by structure: Kurtic et al. 2023, https://arxiv.org/abs/2302.04089, section 3.2. Limitations: attention and FFN are
measured separately, so the table misses cache effects of blocks that are small in both; the pruned shape is measured, and the budget
corrected (`prune.latency.budget`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from foundation.models.architecture.structure import Sizes

DEPTHS = (2, 6)
POINTS = 6
"""Most points of each grid."""
Point = tuple[int, int, int, int, int]
"""Depth, head groups, FFN neurons; head groups and FFN neurons of the last block."""


class WrittenCurve(TypedDict):
    """A `Curve`, as it is cached."""

    counts: list[int]
    ms: list[float]


class Written(TypedDict):
    """A `LatencyTable`, as it is cached."""

    rest_ms: float
    block_ms: float
    heads: WrittenCurve
    ffn: WrittenCurve
    last: list[float]


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
    last: tuple[float, float] = (1.0, 1.0)
    """Share of these milliseconds that additional head groups and FFN neurons of the last block take."""

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
        most = most_heads, most_ffn
        full = measured[many, *most, *most]
        by_heads = [measured[many, count, most_ffn, count, most_ffn] for count in heads]
        by_ffn = [measured[many, most_heads, count, most_heads, count] for count in ffn]
        last = (
            _share(full - by_heads[0], full - measured[many, *most, heads[0], most_ffn]),
            _share(full - by_ffn[0], full - measured[many, *most, most_heads, ffn[0]]),
        )
        of_heads = Curve.of(heads, [ms / (many - 1 + last[0]) for ms in by_heads])
        of_ffn = Curve.of(ffn, [ms / (many - 1 + last[1]) for ms in by_ffn])
        saved = (1 - last[0]) * of_heads.ms[-1] + (1 - last[1]) * of_ffn.ms[-1]
        slope = (full - measured[few, *most, *most]) / (many - few)
        whole = min(max(0.0, slope), (full + saved) / many)  # noise must make neither part negative
        return cls(full - many * whole + saved, max(0.0, whole - of_heads.ms[-1] - of_ffn.ms[-1]), of_heads, of_ffn, last)

    @classmethod
    def read(cls, values: Written) -> LatencyTable:
        """Reads a table that `as_json` wrote."""
        heads, ffn = (Curve(tuple(curve["counts"]), tuple(curve["ms"])) for curve in (values["heads"], values["ffn"]))
        by_heads, by_ffn = values["last"]
        return cls(values["rest_ms"], values["block_ms"], heads, ffn, (by_heads, by_ffn))

    def as_json(self) -> Written:
        """Returns the table as JSON types."""
        return {
            "rest_ms": self.rest_ms,
            "block_ms": self.block_ms,
            "heads": {"counts": [*self.heads.counts], "ms": [*self.heads.ms]},
            "ffn": {"counts": [*self.ffn.counts], "ms": [*self.ffn.ms]},
            "last": [*self.last],
        }

    def shares(self, last: bool) -> tuple[float, float]:
        """Returns the share of their milliseconds that heads and neurons of a block take: 1, except in the last block."""
        return self.last if last else (1.0, 1.0)

    def block(self, heads: float, ffn: float, last: bool = False) -> float:
        """Returns the predicted milliseconds of one block."""
        of_heads, of_ffn = self.shares(last)
        return self.block_ms + of_heads * self.heads.at(heads) + of_ffn * self.ffn.at(ffn)

    def predict(self, sizes: Sizes) -> float:
        """Returns the predicted milliseconds of a model."""
        end = len(sizes.ffn) - 1
        blocks = enumerate(zip(sizes.key_value_heads, sizes.ffn, strict=True))
        return self.rest_ms + sum(self.block(*counts, last=number == end) for number, counts in blocks)


def grid(most: int, step: int) -> tuple[int, ...]:
    """Returns up to `POINTS` roughly evenly spaced counts, ascending: multiples of `step`, and `most` as the last."""
    allowed = sorted({most, *range(min(step, most), most, step)})
    places = np.linspace(0, len(allowed) - 1, min(POINTS, len(allowed)))
    return tuple(dict.fromkeys(allowed[round(float(place))] for place in places))


def points(heads: Sequence[int], ffn: Sequence[int]) -> list[Point]:
    """Returns the points to measure, largest first."""
    few, many = DEPTHS
    most = heads[-1], ffn[-1]
    equal = [most, *((count, ffn[-1]) for count in heads[:-1]), *((heads[-1], count) for count in ffn[:-1])]
    last = [(heads[0], ffn[-1])] if len(heads) > 1 else []
    last += [(heads[-1], ffn[0])] if len(ffn) > 1 else []
    deep: list[Point] = [(many, *counts, *counts) for counts in equal]
    return [deep[0], (few, *most, *most), *deep[1:], *((many, *most, *counts) for counts in last)]


def _share(all_blocks: float, last_block: float) -> float:
    """Returns the saving of the last block as a share of the saving of each other block of the deep model, within 0 and 1."""
    each = (all_blocks - last_block) / (DEPTHS[1] - 1)
    return min(max(last_block / each, 0.0), 1.0) if each > 0 else 1.0
