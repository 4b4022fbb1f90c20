import json
from typing import Annotated

import pytest
from pydantic import Field, ValidationError

from docs.generate import Key, Section, sections
from foundation.artifacts.document import Document, Figures, Number
from tests.report_keys import unknown


class Part(Document):
    """A part."""

    low: Number | None = None
    """Lower end."""
    turns: tuple[Number | None, ...] = ()
    """Turns."""


class Whole(Document):
    """A document."""

    schema_: int = Field(1, alias="schema")
    """Version."""
    name: str = "unnamed"
    """Name."""
    parts: tuple[Part, ...] = ()
    """Parts."""
    named: dict[Annotated[str, "BACKEND"], Part] = Field(default_factory=dict)
    """Parts by backend."""
    figures: Figures | None = None
    """Figures of a stage."""


WRITTEN = {
    "schema": 1,
    "name": "a",
    "parts": [{"low": 1, "turns": [1.0, None, 2]}, {"low": None}],
    "named": {"torch": {"low": 0.5}},
    "figures": {"any": [None, {"thing": 1}]},
}


def test_what_is_read_is_written_again_to_the_byte() -> None:
    text = json.dumps(WRITTEN, indent=1)
    whole = Whole.model_validate(json.loads(text))
    assert json.dumps(whole.written(), indent=1) == text
    assert (whole.parts[0].low, whole.parts[1].turns, whole.named["torch"].low) == (1, (), 0.5)


def test_absent_and_null_keys_have_their_defaults_and_are_not_written() -> None:
    whole = Whole.model_validate({"name": None, "parts": [None, {"low": None}], "named": {"torch": None}})
    assert (whole.name, whole.named, len(whole.parts)) == ("unnamed", {}, 1)
    assert whole.written() == {"parts": [{"low": None}], "named": {}}
    assert Whole().written() == {}


def test_keys_of_a_later_version_are_kept_and_named() -> None:
    later = {**WRITTEN, "new": 1, "named": {"torch": {"more": [1]}}}
    whole = Whole.model_validate(later)
    assert whole.written() == {**{key: value for key, value in later.items() if key != "new"}, "new": 1}
    assert list(unknown(whole)) == ["new", "named.torch.more"]


def test_a_value_of_another_type_is_refused_and_nothing_is_changed_in_place() -> None:
    with pytest.raises(ValidationError):
        Whole.model_validate({"parts": 1})
    whole = Whole.model_validate(WRITTEN)
    with pytest.raises(ValidationError):
        whole.name = "b"
    assert whole.with_(name="b").written() == {**WRITTEN, "name": "b"}


def test_a_number_that_is_none_is_not_written_as_null() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json.dumps(Part(low=float("nan")).written(), allow_nan=False)


def test_the_reference_lists_each_map_once_with_names_that_vary() -> None:
    assert sections(Whole) == [
        Section(
            "",
            (
                Key("schema", "integer", "Version."),
                Key("name", "text", "Name."),
                Key("parts[]", "map", "Parts."),
                Key("named.BACKEND", "map", "Parts by backend. Same keys as `parts[]`."),
                Key("figures", "map", "Figures of a stage."),
            ),
        ),
        Section("parts[]", (Key("low", "number", "Lower end."), Key("turns[]", "number", "Turns."))),
    ]
