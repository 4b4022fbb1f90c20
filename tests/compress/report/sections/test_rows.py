"""Rows whose answer changed say between which two backends it did."""

from typing import Any

import pytest

from compress.report.sections.rows import flipped
from tests.plain_reports import contents

FLIP: dict[str, Any] = {"row": 85, "variant": "quantize", "before": "0", "after": "1", "label": "0", "input": "a text"}


@pytest.mark.parametrize(
    ("from_", "to", "step"),
    [
        ("baseline torch", "torch", "baseline torch \u2192 quantize torch"),
        ("torch", "openvino", "quantize: torch \u2192 OpenVINO"),
        ("onnxruntime", "triton", "quantize: ONNX Runtime \u2192 Triton"),
    ],
)
def test_the_step_names_both_models_only_where_they_differ(from_: str, to: str, step: str) -> None:
    [row] = flipped(contents({"flipped_rows": [{**FLIP, "from": from_, "to": to}]}))
    assert row["step"] == step
    assert row["verdict"] == "lost"
