"""The share that has to go on: python -m pytest tests/benchmarks/test_student_confidence.py"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cascades.student_confidence import goes_on, interval


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=12), st.sampled_from([0.0, 0.1, 0.25, 1.0]))
def test_the_least_share_that_has_to_go_on_is_that_of_the_best_threshold(rows, bound):
    scores, wrong = np.array([float(row[0]) for row in rows]), np.array([row[1] for row in rows])
    tried = []
    for threshold in (*sorted(set(scores)), np.inf):
        keeps = scores >= threshold
        if (keeps & wrong).sum() <= bound * len(rows):
            tried.append(1 - keeps.mean())
    assert abs(goes_on(scores, wrong, bound) - min(tried)) < 1e-12


def test_students_that_are_the_same_do_not_differ():
    rng = np.random.default_rng(0)
    one = rng.normal(size=50), rng.random(50) < 0.3
    assert interval(lambda scores, wrong: goes_on(scores, wrong, 0.05), one, one, 20) == "+0.0000 to +0.0000"
    better = np.where(one[1], one[0] - 5, one[0]), one[1]
    low, high = interval(lambda scores, wrong: goes_on(scores, wrong, 0.05), better, one, 50).split(" to ")
    assert float(high) < 0.1
    assert float(low) < 0
