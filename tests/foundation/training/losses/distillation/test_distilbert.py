from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from foundation.training.losses.distillation.distilbert import cosine


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.integers(0, 99))
def test_it_is_the_formula(rows: int, length: int, width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (torch.randn(rows, length, width, generator=generator) for _ in range(2))
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    mask = torch.arange(length) < lengths[:, None]
    student[~mask], teacher[~mask] = torch.nan, torch.inf  # whatever padding holds
    result = cosine(student, teacher, mask)
    for row in range(rows):
        total = 0.0
        for token in range(int(lengths[row])):
            s, t = student[row, token].tolist(), teacher[row, token].tolist()
            product = sum(x * y for x, y in zip(s, t, strict=True))
            total += 1 - product / (math.hypot(*s) * math.hypot(*t))
        assert math.isclose(float(result[row]), total / int(lengths[row]), rel_tol=1e-4, abs_tol=1e-5)


def test_only_directions_count() -> None:
    teacher, mask = torch.randn(2, 3, 4), torch.ones(2, 3, dtype=torch.bool)
    torch.testing.assert_close(cosine(7 * teacher, teacher, mask), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(cosine(-teacher, teacher, mask), torch.full((2,), 2.0))
