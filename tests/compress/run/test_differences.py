"""Where two pieces of plain data differ, against the leaves of both written out."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from compress.run.differences import differences

VALUES = st.integers(0, 2) | st.sampled_from(["a", "b"])
DATA = st.recursive(VALUES, lambda inner: st.dictionaries(st.sampled_from("kmn"), inner, max_size=3), max_leaves=8)
MAPS = st.dictionaries(st.sampled_from("kmn"), DATA, max_size=3)


def leaves(data: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(data, dict):
        return {path: data}
    return {inner: value for key, part in data.items() for inner, value in leaves(part, (*path, key)).items()}


@given(MAPS, MAPS)
def test_the_leaves_below_what_differs_are_those_that_are_not_in_both(one: dict[str, Any], other: dict[str, Any]) -> None:
    found = list(differences(one, other))
    assert all(difference.before != difference.now for difference in found)
    below = [tuple(difference.path.split(".")) for difference in found]
    unlike = {path for path, _ in leaves(one).items() ^ leaves(other).items()}
    assert unlike == {path for path in {*leaves(one), *leaves(other)} if any(path[: len(start)] == start for start in below)}
    assert not list(differences(one, one))


def test_lists_of_one_length_are_compared_by_place() -> None:
    assert list(differences({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}], "c": None})) == [("a[1].b", 2, 3)]
    assert list(differences({"a": [1]}, {"a": [1, 2]})) == [("a", [1], [1, 2])]
