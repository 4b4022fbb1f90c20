"""Offsets of groups: the fit against least squares, and the search against one written out.

python -m pytest tests/quantize/groups/test_offsets.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from foundation.schemes.scales import Grid
from quantize.group_scales import diagonal_blocks
from quantize.groups.errors import GroupErrors
from quantize.groups.offsets import CLIPS, _fitted, best_offset, full_offsets, searched_offsets
from tests.quantize.groups.test_levels import KINDS, error, hessian_of, weights


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shift", [-1.0, 0.0, 1.0])
def test_the_fit_is_that_of_least_squares(weighted: bool, shift: float) -> None:
    """Against non-negative least squares of L^T (s u - m - w) with H = L L^T."""
    inputs, size = 24, 8
    weight = weights("normal", 1, 5, inputs) + 0.04 * shift
    hessian = hessian_of(1, inputs) + 0.1 * torch.eye(inputs) if weighted else torch.eye(inputs)
    errors = GroupErrors.of(weight, size, diagonal_blocks(hessian, size) if weighted else None)
    start = full_offsets(errors)
    found, steps = _fitted(errors, start), errors.steps(start)
    assert found.offset is not None
    for o in range(5):
        for g in range(3):
            part = slice(g * size, (g + 1) * size)
            root = np.linalg.cholesky(hessian[part, part].double().numpy()).T
            u, w = steps[g, o].double().numpy(), weight[o, part].double().numpy()
            (s, m), _ = nnls(root @ np.stack([u, -np.ones(size)], 1), root @ w)
            assert float(found.scale[o, g]) == pytest.approx(s, rel=1e-3)
            assert float(found.offset[o, g]) == pytest.approx(m, rel=1e-3, abs=1e-5)
    fixed = best_offset(errors, Grid(found.scale, offset=found.offset))
    again = errors.steps(found) * found.scale.T[:, :, None]
    for o in range(5):
        for g in range(3):
            part, ones = slice(g * size, (g + 1) * size), np.ones(size)
            block = hessian[part, part].double().numpy()
            left = again[g, o].double().numpy() - weight[o, part].double().numpy()
            assert float(fixed[o, g]) == pytest.approx(left @ block @ ones / (ones @ block @ ones), rel=1e-3, abs=1e-6)


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 20), st.sampled_from([1, 3, 8]), st.sampled_from(KINDS), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_search_is_no_worse_than_any_clip(seed: int, outputs: int, inputs: int, size: int, values: str, weighted: bool) -> None:
    weight = weights(values, seed, outputs, inputs)
    hessian = hessian_of(seed, inputs) if weighted else torch.eye(inputs)
    errors = GroupErrors.of(weight, size, diagonal_blocks(hessian, size) if weighted else None)
    found = searched_offsets(errors)
    assert found.offset is not None
    assert found.scale.isfinite().all()
    assert (found.scale > 0).all()
    assert found.offset.isfinite().all()
    assert (found.offset >= 0).all()
    error_OG = errors.of_grid(found)
    for o in range(outputs):
        for g in range(error_OG.shape[1]):
            part = slice(g * size, min((g + 1) * size, inputs))
            w, h = weight[o, part], hessian[part, part]
            low, high = min(float(w.min()), 0.0), max(float(w.max()), 0.0)
            power = float(w.double() @ h.double() @ w.double())
            for clip in CLIPS:
                s = clip * (high - low) / 15
                m = max(-low - (1 - clip) * (high - low) / 2, 0.0)
                if s > 1e-15:
                    assert float(error_OG[o, g]) <= error(w, h, s, None, m) * (1 + 1e-3) + 1e-6 * power


def test_inputs_past_the_end_of_a_short_group_do_not_count() -> None:
    weight = torch.full((1, 5), 0.7) + torch.arange(5) * 0.01
    whole, short = (searched_offsets(GroupErrors.of(weight, size, None)) for size in (5, 8))
    torch.testing.assert_close(whole.scale, short.scale)
    torch.testing.assert_close(errors_of(weight, 5, whole), errors_of(weight, 8, short))


def errors_of(weight: torch.Tensor, size: int, grid: Grid) -> torch.Tensor:
    return GroupErrors.of(weight, size, None).of_grid(grid)
