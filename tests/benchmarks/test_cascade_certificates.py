"""Draws of the benchmark choose as the stage does: python -m pytest tests/benchmarks/test_cascade_certificates.py"""

import numpy as np

from benchmarks.cascades.cascade_certificates import Pool, drawn
from export.cascade.path import path
from export.cascade.tested import Bounds, certify_path
from tests.export.cascade.test_tested import MARGIN, keys, part, population


def test_a_draw_chooses_the_point_that_the_stage_would() -> None:
    rows, (fixed, _) = population(400)[0], population(300, seed=2)
    known = fixed.seen([MARGIN], [1.0, 5.0])
    points = path(known)
    times = [known.time_ms(point) for point in points]
    pool = Pool("pool", "", rows.seen([MARGIN], [1.0, 5.0]), points, times)
    chosen, none = drawn(pool, 200, 0.05, 0.9, 5, seed=7)
    assert none == 0
    rng = np.random.default_rng(7)
    for point in chosen.tolist():
        some = part(rows, rng.integers(0, 400, 200))
        assert certify_path(some, some.seen([MARGIN], [1.0, 5.0]), points, times, Bounds(0.05, 0.1), keys(200)).chosen == point
