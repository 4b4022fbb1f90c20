"""Two-level scales against a search written out group by group, and by their error.

python -m pytest tests/quantize/groups/test_levels.py
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foundation.core.errors import InputError
from foundation.schemes.int4 import GroupScales, Int4Scales
from foundation.schemes.scales import Grid
from foundation.schemes.two_level import are_two_level
from quantize.group_scales import GroupMoments, Groups, diagonal_blocks, full_grid, searched_grid
from quantize.groups.errors import GroupErrors
from quantize.groups.levels import two_level
from quantize.groups.offsets import searched_offsets

CASES: list[tuple[GroupScales, bool]] = [("two_level", True), ("two_level", False), ("k_quant", False)]
KINDS = ["normal", "outlier", "zero groups", "all zero", "one sign", "constant", "tiny", "large", "small beside large"]


def weights(kind: str, seed: int, outputs: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * 0.05
    match kind:
        case "outlier":
            weight[:, -1] = 1e3
        case "zero groups":
            weight[:, : inputs // 2] = 0
        case "all zero":
            weight.zero_()
        case "one sign":
            weight = weight.abs() + 0.1
        case "constant":
            weight[:] = -0.3
        case "tiny":
            weight *= 1e-12
        case "large":
            weight *= 1e5
        case "small beside large":
            weight[:, : inputs // 2] *= 1e-6
    return weight


def hessian_of(seed: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(20, inputs, generator=generator) * torch.randn(inputs, generator=generator).exp() + 0.3
    return x.T @ x / 20


def five_bits(value: float) -> float:
    value = min(max(value, 2.0**-24), 2.0**10)
    quantum = max(2.0 ** (math.floor(math.log2(value)) - 4), 2.0**-24)
    return round(value / quantum) * quantum


def rounded(w: Tensor, s: float, z: int | None, m: float | None) -> Tensor:
    """Rounds a group: to s (q - z), or s u - m."""
    if m is not None:
        return ((w + m) / s).round().clamp(0, 15) * s - m
    zero = z or 0
    return (w / s).round().clamp(-8 - zero, 7 - zero) * s


def error(w: Tensor, h: Tensor, s: float, z: int | None, m: float | None) -> float:
    difference = (rounded(w, s, z, m) - w).double()
    return float(difference @ h.double() @ difference)


def naive(groups: list[Tensor], blocks: list[Tensor], start: Grid, o: int) -> list[float]:
    """Returns the errors of the groups of a super-block, from the definition, with the best d."""
    scale, numbers = [float(value) for value in start.scale[o]], range(len(groups))
    for g in numbers:
        if not groups[g].any():
            scale[g] = 0.0
    zeros = [None if start.zero_point is None else int(start.zero_point[o, g]) for g in numbers]
    offsets = [None if start.offset is None else float(start.offset[o, g]) for g in numbers]
    e = None if start.offset is None else five_bits(max(offset for offset in offsets if offset is not None) / 63)
    best = [math.inf]
    for top in (63, 56):
        d = five_bits(max(scale) / top)
        found = []
        for g in numbers:
            tried = []
            for change in (0, -1, 1, -2, 2):
                s = min(max(round(scale[g] / d) + change, 1), 63) * d
                if e is not None:
                    first = min(round(offsets[g] / e), 63) * e  # type: ignore[operator]
                    u = ((groups[g] + first) / s).round().clamp(0, 15)
                    ones = torch.ones_like(groups[g])
                    weight = float(ones @ blocks[g] @ ones)
                    middle = float((u * s - groups[g]) @ blocks[g] @ ones) / weight if weight else first
                    around = [min(max(round(middle / e) + k, 0), 63) * e for k in (-1, 0, 1)]
                    tried += [error(groups[g], blocks[g], s, None, m) for m in (first, *around)]
                elif zeros[g] is not None:
                    near = [min(max(zeros[g] + k, -8), 7) for k in (-1, 0, 1)]  # type: ignore[operator]
                    tried += [error(groups[g], blocks[g], s, z, None) for z in near]
                else:
                    tried.append(error(groups[g], blocks[g], s, None, None))
            found.append(min(tried))
        best = min(best, found, key=sum)
    return best


def naively_rounded(start: Grid, o: int, first: int, last: int) -> list[tuple[float, int | None, float | None]]:
    """Returns s, z and m of groups as plain rounding to the nearest integers gives them."""
    d = five_bits(float(start.scale[o, first:last].max()) / 63)
    e = None if start.offset is None else five_bits(float(start.offset[o, first:last].max()) / 63)
    found = []
    for g in range(first, last):
        s = min(max(round(float(start.scale[o, g]) / d), 1), 63) * d
        m = None if start.offset is None or e is None else min(round(float(start.offset[o, g]) / e), 63) * e
        found.append((s, None if start.zero_point is None else int(start.zero_point[o, g]), m))
    return found


def start_of(weights: GroupErrors, weight: Tensor, size: int, kind: GroupScales, symmetric: bool, hessian: Tensor | None) -> Grid:
    return (
        searched_offsets(weights)
        if kind == "k_quant"
        else searched_grid(weight, size, None if hessian is None else diagonal_blocks(hessian, size), symmetric=symmetric)
    )


@pytest.mark.parametrize(("kind", "symmetric"), CASES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("inputs", [3, 32, 37, 72])
def test_errors_are_those_of_the_written_out_search(kind: GroupScales, symmetric: bool, weighted: bool, inputs: int) -> None:
    weight, size = weights("normal", inputs, 3, inputs), 4
    hessian = hessian_of(inputs, inputs) if weighted else None
    errors = GroupErrors.of(weight, size, None if hessian is None else diagonal_blocks(hessian, size))
    start = start_of(errors, weight, size, kind, symmetric, hessian)
    found = two_level(errors, start)
    stored = Int4Scales.of_grid(found, size)
    assert stored.problem(stored.on_grid(weight)) is None
    full = torch.eye(inputs) if hessian is None else hessian
    for o in range(3):
        for first in range(0, inputs, 8 * size):
            spans = [(i, min(i + size, inputs)) for i in range(first, min(first + 8 * size, inputs), size)]
            groups, blocks = [weight[o, i:j] for i, j in spans], [full[i:j, i:j] for i, j in spans]
            part = slice(first // size, first // size + len(spans))
            here = Grid(*(None if tensor is None else tensor[:, part] for tensor in start[:3]))  # type: ignore[arg-type]
            expected = naive(groups, blocks, here, o)
            ours = [float(d @ h @ d) for (i, j), h in zip(spans, blocks, strict=True) for d in [(stored.on_grid(weight) - weight)[o, i:j]]]
            assert sum(ours) == pytest.approx(sum(expected), rel=1e-3, abs=1e-9)


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "symmetric"), CASES)
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 80), st.sampled_from([2, 5, 8]), st.sampled_from(KINDS), st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_super_block_errs_more_than_by_plain_rounding(
    kind: GroupScales, symmetric: bool, seed: int, outputs: int, inputs: int, size: int, values: str, weighted: bool
) -> None:
    weight = weights(values, seed, outputs, inputs)
    hessian = hessian_of(seed, inputs) if weighted else None
    blocks = None if hessian is None else diagonal_blocks(hessian, size)
    how = Groups(size, symmetric, "outputs" if weighted else "weights", kind)
    found = how.grid(weight, blocks)
    stored = Int4Scales.of_grid(found, size)
    assert stored.problem(stored.on_grid(weight)) is None
    assert stored.group_scales == kind
    errors = GroupErrors.of(weight, size, blocks)
    start, error_OG = start_of(errors, weight, size, kind, symmetric, hessian), errors.of_grid(found)
    full = torch.eye(inputs) if hessian is None else hessian
    for o, first in product(range(outputs), range(0, error_OG.shape[1], 8)):
        last = min(first + 8, error_OG.shape[1])
        spans = [(g * size, min((g + 1) * size, inputs)) for g in range(first, last)]
        if not any(weight[o, i:j].any() for i, j in spans):
            assert torch.equal(stored.on_grid(weight)[o, spans[0][0] : spans[-1][1]], torch.zeros(spans[-1][1] - spans[0][0]))
            continue
        if not all(weight[o, i:j].any() for i, j in spans):
            continue  # the float scale of a group of zeros is 1
        plain = naively_rounded(start, o, first, last)
        expected = sum(error(weight[o, i:j], full[i:j, i:j], *one) for (i, j), one in zip(spans, plain, strict=True))
        power = sum(float(weight[o, i:j].double() @ full[i:j, i:j].double() @ weight[o, i:j].double()) for i, j in spans)
        assert float(error_OG[o, first:last].sum()) <= expected * (1 + 1e-4) + 1e-6 * power


@pytest.mark.parametrize(("kind", "symmetric"), CASES)
def test_weights_on_a_two_level_grid_stay_there(kind: GroupScales, symmetric: bool) -> None:
    """Where the float grid is a two-level one, nothing is lost."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(20, 60, (3, 11), generator=generator)
    a[:, ::8] = 63
    code = torch.randint(0, 16, (3, 11, 16), generator=generator)
    code[..., 0], code[..., 1] = 0, 15  # the group spans its codes
    b = (a + torch.randint(-3, 4, a.shape, generator=generator)).clamp(max=63)  # 7 to 9 steps, so that a group has both signs
    b[:, ::8] = 63
    s, zero = a * 2.0**-12, torch.randint(1, 15, (3, 11, 1), generator=generator)
    steps = code - (8 if symmetric else zero)
    weight = (code * s[..., None] - (b * 2.0**-9)[..., None]) if kind == "k_quant" else steps * s[..., None]
    stored = Int4Scales.of_grid(Groups(16, symmetric, "weights", kind).grid(weight.flatten(1)), 16)
    torch.testing.assert_close(stored.on_grid(weight.flatten(1)), weight.flatten(1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "symmetric"), CASES)
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 40), st.sampled_from([2, 5, 8]), st.sampled_from(KINDS))
@settings(max_examples=30, deadline=None)
def test_the_whole_range_clips_nothing(
    kind: GroupScales, symmetric: bool, seed: int, outputs: int, inputs: int, size: int, values: str
) -> None:
    weight = weights(values, seed, outputs, inputs)
    stored = Int4Scales.of_grid(Groups(size, symmetric, "minmax", kind).grid(weight), size)
    assert stored.problem(stored.on_grid(weight)) is None
    step = stored.expanded(inputs)
    assert ((stored.on_grid(weight) - weight).abs() <= 0.5 * step * (1 + 1e-3) + 1e-6 * weight.abs()).all()
    if kind == "two_level" and values == "normal":
        plain = full_grid(weight, size, symmetric=symmetric).scale
        assert (stored.weight_scale >= plain * (1 - 1e-4)).all()


def test_offsets_err_less_than_zero_points_at_fewer_bits_than_float_scales() -> None:
    weight = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * 0.05
    found = {kind: Int4Scales.of_grid(Groups(32, False, "weights", kind).grid(weight), 32) for kind in ("float", "two_level", "k_quant")}
    errors = {kind: float((one.on_grid(weight) - weight).square().sum()) for kind, one in found.items()}
    assert errors["two_level"] < 1.02 * errors["float"]
    assert errors["k_quant"] < 0.9 * errors["float"]
    assert found["two_level"].stored_bits() < found["k_quant"].stored_bits() < found["float"].stored_bits()


def test_scales_beyond_float16_are_refused() -> None:
    for kind, symmetric in CASES:
        with pytest.raises(InputError, match="float16 numbers up to"):
            Groups(4, symmetric, "weights", kind).grid(torch.full((1, 8), -1e7))


def test_outputs_weigh_errors_by_the_moments_of_the_rows() -> None:
    weight, x = weights("normal", 3, 8, 40), torch.randn(50, 40) * torch.linspace(0.1, 3, 40)
    moments = GroupMoments(8)
    moments.add(x)
    by = {name: Groups(8, False, name, "k_quant") for name in ("weights", "outputs")}  # type: ignore[arg-type]
    grids = {name: how.grid(weight, moments.blocks_Ggg) for name, how in by.items()}
    errors = GroupErrors.of(weight, 8, moments.blocks_Ggg)
    assert float(errors.of_grid(grids["outputs"]).sum()) < 0.95 * float(errors.of_grid(grids["weights"]).sum())


def test_divided_outputs_have_two_level_grids_next_to_the_divided_ones() -> None:
    weight, factor = weights("normal", 5, 6, 50), torch.linspace(0.3, 3, 6)
    for kind, symmetric in CASES:
        how = Groups(8, symmetric, "weights", kind)
        before = how.grid(weight)
        found = how.divided(weight / factor[:, None], before, factor)
        assert found.super_scale is not None
        assert are_two_level(found.scale, found.super_scale, smallest=1)
        errors = [
            (Int4Scales.of_grid(grid, 8).on_grid(values) - values).square().sum(1) * scaled
            for grid, values, scaled in ((before, weight, 1.0), (found, weight / factor[:, None], factor.square()))
        ]
        assert (errors[1] < 1.1 * errors[0]).all()
    plain = Groups(8).grid(weight)
    assert torch.equal(Groups(8).divided(weight, plain, factor).scale, plain.scale / factor[:, None])
