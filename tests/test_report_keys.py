"""The reference of report.json and a report are compared key by key; the reports of the shipped recipes are, in test_recipes."""

from compress.compare.keys import KEYS as COMPARE_KEYS
from compress.report.keys import KEYS
from compress.search.keys import KEYS as SEARCH_KEYS
from tests.report_keys import paths, undocumented, unwritten


def test_a_key_that_no_row_names_is_found() -> None:
    known = {
        "schema": 1,
        "flips": None,
        "variants": [{"id": "a", "metrics": {"torch": {"accuracy": 1.0}}, "pruning": {"any": [{"thing": 1}]}}],
    }
    assert undocumented(known) == []
    assert undocumented({**known, "surprise": 1}) == ["surprise"]
    assert undocumented({"variants": [{"id": "a", "extra": 1}], "goals": [{"goal": "max_drop", "wrong": 2}]}) == [
        "goals[].wrong",
        "variants[].extra",
    ]


def test_empty_and_null_maps_and_lists_are_no_new_keys() -> None:
    assert undocumented({"variants": [], "triton": {"models": []}, "warnings": []}) == []
    assert undocumented({"variants": [{"id": "a", "quantization": None, "parity": None, "latency": [], "metrics": {}}]}) == []


def test_rows_that_nobody_writes_are_found() -> None:
    known = {
        "rows": {"selection": 1},
        "space": [{"path": "a.b", "choices": [1]}],
        "importances": {"metric": {"a.b": 1.0}},
        "objectives": [],
    }
    rows = [key for key in SEARCH_KEYS if key.path.partition(".")[0].removesuffix("[]") in known]
    absent = ["rows.evaluation", "space[].kind", "space[].low", "space[].high", "space[].step", "space[].log"]
    assert unwritten([known], rows) == absent
    assert unwritten([known, {"rows": {"evaluation": 2}}], rows) == absent[1:]


def test_rows_are_complete_and_unique() -> None:
    for keys in (KEYS, SEARCH_KEYS, COMPARE_KEYS):
        assert len({key.path for key in keys}) == len(keys)
        assert all(key.meaning.endswith(".") and key.type for key in keys)
    assert list(paths({"a": [{"b": 1}, {}], "c": {}})) == ["a[].b", "a[]", "c"]
