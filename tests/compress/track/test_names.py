"""Flat names of figures: every number of a report has one, and servers take each."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from compress.report.model.contents import Contents
from compress.track.names import LONGEST_NAME, NO_FIGURES, figures, settings
from tests.compress.report.test_goals import make_report

TAKEN = re.compile(r"[/\w.\- ]*")
"""Names that MLflow takes (`mlflow.utils.validation`)."""


def numbers(value: Any) -> Iterator[float]:
    """Yields every number of plain data, with 1 and 0 for true and false."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, bool | int | float):
        yield float(value)


def test_every_number_of_a_report_has_a_name_of_its_own() -> None:
    plain = make_report(
        goals=[{"goal": "max_drop", "limit": 0.01, "met": True}, {"goal": "max_drop", "limit": 0.02, "met": None}],
        classes={"rows": [{"name": "a/b", "n": 1}, {"name": "a:b", "n": 2}, {"name": "x" * 300, "n": 3}, {"name": "..", "n": 4}]},
        flipped_rows=[{"row": 7}],
        later={"list": [1, [2, 3], {"name": "n", "value": 4}]},
    )
    contents = Contents.model_validate(plain)
    found = figures(contents).numbers
    assert Counter(found.values()) == Counter(numbers({key: value for key, value in contents.written().items() if key not in NO_FIGURES}))
    assert all(TAKEN.fullmatch(name) and len(name) <= LONGEST_NAME and "//" not in name and "/../" not in name for name in found)


def test_entries_of_lists_are_called_by_what_they_are_of() -> None:
    found = figures(Contents.model_validate(make_report(goals=[{"goal": "max_drop", "value": 0.5}, {"goal": "max_drop", "value": 0.6}])))
    assert found.numbers["variants/quantize/accuracy/openvino/value"] == 0.894
    assert found.numbers["variants/quantize/int8_layers/b/macs"] == 20.0
    assert found.numbers["goals/max_drop/value"] == 0.5
    assert found.numbers["goals/max_drop.2/value"] == 0.6
    [name] = [name for name in found.numbers if name.startswith("variants/quantize/latency/onnxruntime") and name.endswith("/p50_ms")]
    assert "int8" in name
    assert found.texts["metric/name"] == "accuracy"
    assert found.texts["baseline"] == "baseline"
    assert not any(name.startswith("variants/") for name in found.texts)


def test_settings_of_a_recipe_are_called_by_their_keys() -> None:
    stages = [{"quantize": {"id": "int8", "mode": "ptq", "layers": [1, 2], "nothing": None, "losses": [{"name": "mse"}]}}]
    assert settings({"name": "tiny", "seed": 0, "data": {"path": "x" * 600}, "stages": stages}) == {
        "name": "tiny",
        "seed": "0",
        "data/path": "x" * 497 + "...",
        "stages/int8/id": "int8",
        "stages/int8/mode": "ptq",
        "stages/int8/layers": "[1, 2]",
        "stages/int8/losses/0/name": "mse",
    }
