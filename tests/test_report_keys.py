"""The models of documents and what is written are compared key by key; the reports of the shipped recipes are, in test_recipes."""

import pytest

from compress.compare.model import Comparison
from compress.report.model.contents import Contents
from compress.search.model import Search
from docs.generate import sections
from foundation.artifacts.document import Document
from tests.report_keys import paths, undocumented, unwritten


def test_a_key_that_no_field_names_is_found() -> None:
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


def test_rows_that_nobody_writes_are_found() -> None:
    found = unwritten([{"rows": {"selection": 1}, "space": [{"path": "a.b", "choices": [1]}], "objectives": []}], Search)
    assert {"rows.evaluation", "space[].low", "importances.OBJECTIVE"} <= set(found)
    assert not {"rows", "rows.selection", "space[]", "space[].path", "space[].choices[]", "objectives[]"} & set(found)


@pytest.mark.parametrize("model", [Contents, Search, Comparison])
def test_every_field_has_a_meaning_and_stands_once(model: type[Document]) -> None:
    rows = [(section.path, key.name) for section in sections(model) for key in section.keys]
    assert len(set(rows)) == len(rows)
    assert [key.name for section in sections(model) for key in section.keys if not key.meaning.endswith(".")] == []


def test_every_path_of_a_document_is_listed() -> None:
    assert list(paths({"a": [{"b": 1}, {}], "c": {}})) == ["", "a", "a[]", "a[].b", "a[]", "c"]
