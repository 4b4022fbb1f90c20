"""What stands beside a relevant document: never what is relevant, near beside near, and documents that are right elsewhere."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.reading.wrong_candidates import WrongCandidates, turned

NAMES = [f"d{number}" for number in range(30)]
QUERIES = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(NAMES), st.integers(0, 2), min_size=1, max_size=6), st.permutations(NAMES), st.integers(0, 20)
    ),
    min_size=1,
    max_size=5,
)


@given(QUERIES, st.integers(1, 7))
def test_lists_of_any_judgements(queries: list[tuple[dict[str, int], list[str], int]], most: int) -> None:
    known = {name for grades, _, _ in queries for name, grade in grades.items() if grade}
    chooser = WrongCandidates((name for grades, _, _ in queries for name, grade in grades.items() if grade), most)
    for grades, order, count in queries:
        found, right = order[:count], [name for name, grade in grades.items() if grade]
        made, wrong = chooser.lists(grades, found), [name for name in found if not grades.get(name)]
        assert [names[0] for names in made] == right
        for names in made:
            beside = names[1:]
            assert len(set(names)) == len(names) <= 1 + most
            assert not set(beside) & set(right)
            elsewhere = known.difference(found, right)
            if names[0] not in found and elsewhere:  # missed, beside others that were missed
                assert set(beside) <= elsewhere
                assert len(beside) == min(most, len(elsewhere))
            else:
                assert set(beside) <= set(wrong)
                assert len(beside) == min(most, len(wrong))
                assert len(known.intersection(beside)) == min(most, len(known.intersection(wrong)))


@pytest.mark.parametrize(("candidates", "right", "most"), [(50, 3, 7), (20, 1, 4), (9, 2, 7), (4, 3, 7)])
def test_wrong_ones_are_spread_over_the_candidates_and_shared_as_little_as_can_be(candidates: int, right: int, most: int) -> None:
    order = [f"d{number}" for number in range(candidates)]
    made = WrongCandidates(order[:right], most).lists(dict.fromkeys(order[:right], 1), order)
    wrong = order[right:]
    for names in made:
        places = sorted(wrong.index(name) for name in names[1:])
        assert len(places) == min(most, len(wrong))
        gaps = np.diff([*places, places[0] + len(wrong)])  # around the end
        assert max(gaps) - min(gaps) <= 1
    shared = Counter(name for names in made for name in names[1:])
    if right * most <= len(wrong):
        assert set(shared.values()) == {1}


def test_documents_that_a_search_missed_are_taken_in_turn() -> None:
    """Every document is wrong about as often, so that how often it was wrong tells nothing."""
    queries = [{f"d{4 * number + step}": 1 for step in range(4)} for number in range(20)]
    chooser = WrongCandidates((name for grades in queries for name in grades), 7)
    wrong = Counter(name for grades in queries for names in chooser.lists(grades, []) for name in names[1:])
    assert len(wrong) == 80
    assert sum(wrong.values()) == 80 * 7
    assert max(wrong.values()) <= 10


def test_each_is_moved_on() -> None:
    assert turned("abcdefgh", 0, 4) == list("aceg")
    assert turned("abcdefgh", 3, 4) == list("dfhb")
    assert turned("abc", 1, 7) == list("bca")
    assert turned("", 1, 7) == []
