"""The latency table: what one block costs in milliseconds, as a function of its heads and neurons, on one engine at one shape.

With T(d; h, f) the latency of a model of d equal blocks of h groups of heads and f neurons, H and F those of the largest block,

    block(H, F) = (T(d2; H, F) - T(d1; H, F)) / (d2 - d1)              two depths: embeddings, pooler and head fall out
    rest        = T(d2; H, F) - d2 block(H, F)
    block(h, F), block(H, f)  =  (T(d2; ...) - rest) / d2              on a coarse grid of counts each
    block(h, f) = block(h, F) + block(H, f) - block(H, F)              attention and FFN add up
    latency     = rest + sum over blocks of block(h, f)

Between the points of a grid the line is straight; noise that makes a smaller part slower is averaged away (isotonic regression), so that it
never falls. A table of measured times by structure: Kurtic et al. 2023, https://arxiv.org/abs/2302.04089, section 3.2. Left out: that a
block of few heads and few neurons fits into caches that one part alone does not; the result is measured and the budget corrected for that
(`prune.timing`).
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
"""Of each grid, at most."""
Point = tuple[int, int, int]
"""Depth, groups of heads, neurons."""


@dataclass(frozen=True)
class Curve:
    """Milliseconds by count; straight between the points, level outside of them."""

    counts: tuple[int, ...]
    """Ascending."""
    ms: tuple[float, ...]
    """Never falling."""

    @classmethod
    def of(cls, counts: Sequence[int], ms: Sequence[float]) -> Curve:
        """Returns the curve of least squares through what was measured that never falls, from 0 ms at its first point."""
        from scipy.optimize import isotonic_regression

        rising = isotonic_regression(ms).x
        return cls(tuple(counts), tuple(float(value - rising[0]) for value in rising))

    def at(self, count: float) -> float:
        """Returns the milliseconds of a count."""
        return float(np.interp(count, self.counts, self.ms))

    def expected(self, count: Tensor) -> Tensor:
        """Returns the milliseconds of counts that need not be whole, float32 of their shape; differentiable inside of the grid."""
        counts, ms = (torch.tensor(values, dtype=torch.float32, device=count.device) for values in (self.counts, self.ms))
        if len(counts) == 1:
            return ms[0] + 0 * count
        inside = count.clamp(counts[0], counts[-1])
        left = (torch.searchsorted(counts, inside.detach(), right=True) - 1).clamp(0, len(counts) - 2)
        slope = (ms[left + 1] - ms[left]) / (counts[left + 1] - counts[left])
        return ms[left] + slope * (inside - counts[left])


@dataclass(frozen=True)
class LatencyTable:
    """What was measured, in milliseconds."""

    rest_ms: float
    """Embeddings, pooler and head."""
    block_ms: float
    """A block of the fewest heads and neurons of the grid."""
    heads: Curve
    """What more groups of heads add to it."""
    ffn: Curve
    """What more neurons add to it."""

    @classmethod
    def of(cls, measured: Mapping[Point, float], heads: Sequence[int], ffn: Sequence[int]) -> LatencyTable:
        """Returns the table of what was measured.

        Args:
            measured: Milliseconds of every point of `points`.
            heads: Grid of groups of heads, ascending; the last is H.
            ffn: Grid of neurons; the last is F.
        """
        few, many = DEPTHS
        most_heads, most_ffn = heads[-1], ffn[-1]
        slope = (measured[many, most_heads, most_ffn] - measured[few, most_heads, most_ffn]) / (many - few)
        whole = min(max(0.0, slope), measured[many, most_heads, most_ffn] / many)  # noise: neither part takes less than no time
        rest = measured[many, most_heads, most_ffn] - many * whole
        of_heads = Curve.of(heads, [(measured[many, count, most_ffn] - rest) / many for count in heads])
        of_ffn = Curve.of(ffn, [(measured[many, most_heads, count] - rest) / many for count in ffn])
        return cls(rest, max(0.0, whole - of_heads.ms[-1] - of_ffn.ms[-1]), of_heads, of_ffn)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> LatencyTable:
        """Reads what `as_json` gave."""
        curves = {name: Curve(tuple(values[name]["counts"]), tuple(values[name]["ms"])) for name in ("heads", "ffn")}
        return cls(values["rest_ms"], values["block_ms"], **curves)

    def as_json(self) -> dict[str, Any]:
        """Returns it as JSON types."""
        plain = asdict(self)
        return {**plain, **{name: {key: list(values) for key, values in plain[name].items()} for name in ("heads", "ffn")}}

    def block(self, heads: float, ffn: float) -> float:
        """Returns the milliseconds of a block."""
        return self.block_ms + self.heads.at(heads) + self.ffn.at(ffn)

    def predict(self, sizes: Sizes) -> float:
        """Returns the milliseconds of a model."""
        return self.rest_ms + sum(map(self.block, sizes.key_value_heads, sizes.ffn))


def grid(most: int, step: int) -> tuple[int, ...]:
    """Returns up to `POINTS` counts at about equal distances, multiples of `step` but for the last, which is `most`; ascending."""
    allowed = sorted({most, *range(min(step, most), most, step)})
    places = np.linspace(0, len(allowed) - 1, min(POINTS, len(allowed)))
    return tuple(dict.fromkeys(allowed[round(float(place))] for place in places))


def points(heads: Sequence[int], ffn: Sequence[int]) -> list[Point]:
    """Returns what has to be measured, the largest first."""
    few, many = DEPTHS
    whole = [(many, heads[-1], ffn[-1]), (few, heads[-1], ffn[-1])]
    return [*whole, *((many, count, ffn[-1]) for count in heads[:-1]), *((many, heads[-1], count) for count in ffn[:-1])]
