"""Model cards: front matter that the Hub's library reads back, and figures of exactly what a folder holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.commands.model_card import UNKNOWN, Origin, Published, card
from export.folders.source import PLACE, Built, Snippet, Written
from export.folders.table import FORMATS
from foundation.artifacts import exported
from foundation.labels.tasks import TASKS
from tests.compress.report.test_decision import INT8, finished
from tests.plain_reports import contents

ORIGIN = Origin(
    "apache-2.0",
    "team/bert",
    "[team/bert](https://huggingface.co/team/bert)",
    "nyu-mll/glue",
    (("quantize", "quantize", {"rounding": "gptq", "teacher": "/secret/place/teacher", "losses": [{"of": "~/more/here"}]}),),
)
ENGINE = exported.Engine(
    engine="openvino",
    mode="static",
    float_precision="fp32",
    int8_share=0.9999,
    int8_share_all=0.95,
    integer_weights=0.47,
    size_bytes=59_600_000,
)
BUILT = Built(exported.Build(variant="quantize", precision="int8", float_precision="fp32"), ENGINE, Path("openvino.xml"))
SNIPPETS = (Snippet("OpenVINO", f'load("{PLACE}")'),)


def published(form: str = "openvino", written: Written | None = None, **more: Any) -> Published:
    plain = finished("text-classification", "accuracy", 0.9, 0.89, INT8, {})
    plain["environment"] = {"cpu": "EPYC", "cpu_features": ["avx2"], "cores": 2, "versions": {"openvino": "2026.4.1"}}
    plain["variants"][1] |= {
        "int8_share": 0.9,
        "checkpoint_bytes": 91_000_000,
        "quantization": {"scheme": "w8a8", "weight_bits": 7, "noise": {}},
        "accuracy": {"torch": {"value": 0.895, "n": 500}, "openvino": {"value": 0.8871, "low": 0.86, "high": 0.91, "n": 500}},
    }
    report = contents(plain)
    return Published(
        report, report.variants[1], TASKS["text-classification"], FORMATS[form], written or Written(BUILT, SNIPPETS), ORIGIN, **more
    )


def front(found: str) -> dict[str, Any]:
    _, matter, _ = found.split("---\n", 2)
    read: dict[str, Any] = yaml.safe_load(matter)
    return read


def rows(found: str, title: str) -> list[list[str]]:
    """The rows of the table below a title, without its head."""
    section = found.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")][2:]


def test_the_front_matter_names_licence_origin_and_the_metric_of_this_format() -> None:
    found = card(published())
    assert front(str(found)) == {
        "license": "apache-2.0",
        "base_model": "team/bert",
        "base_model_relation": "quantized",
        "datasets": "nyu-mll/glue",
        "library_name": "openvino",
        "pipeline_tag": "text-classification",
        "tags": ["openvino", "int8"],
        "model-index": [
            {
                "name": "x quantize",
                "results": [
                    {
                        "task": {"type": "text-classification"},
                        "dataset": {"name": "nyu-mll/glue", "type": "nyu-mll/glue"},
                        "metrics": [{"type": "accuracy", "value": 0.8871, "name": "accuracy, OpenVINO"}],
                    }
                ],
            }
        ],
    }
    assert found.data.eval_results[0].metric_value == 0.8871  # read back by the library


def test_figures_are_of_what_the_folder_holds() -> None:
    found = str(card(published()))
    before, after = rows(found, "Accuracy")
    assert before[:2] == ["`baseline`", "torch"]
    assert after[:5] == ["`quantize`", "OpenVINO", "88.71\u00a0%", "86.0\u00a0\u2013\u2060\u00a091.0", "500"]
    times = rows(found, "Latency")
    assert [(row[0], row[1], row[3]) for row in times] == [("1", "32", "2.00"), ("8", "128", "16.0")]  # static, fp32: one of three
    assert "EPYC with avx2, 2 cores; openvino 2026.4.1" in found
    integers = found.split("## Integers")[1].split("##")[0]
    assert [part in integers for part in ("99.9\u00a0%", "47.0\u00a0%", "59.6\u00a0MB")] == [True] * 3


def test_a_format_that_was_not_measured_claims_nothing() -> None:
    found = str(card(published("transformers", Written(None, SNIPPETS, ("A remark.",)))))
    assert "model-index" not in front(found)
    assert front(found)["library_name"] == "transformers"
    assert rows(found, "Latency") == []
    assert "this format was not measured" in found
    assert "A remark." in found
    measured = front(str(card(published("transformers", Written(None, SNIPPETS, as_torch=True, library="sentence-transformers")))))
    assert measured["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.895
    assert measured["library_name"] == "sentence-transformers"


def test_settings_hold_no_path_of_the_machine() -> None:
    found = str(card(published()))
    line = next(line for line in found.splitlines() if line.startswith("2. `quantize`"))
    assert yaml.safe_load(line.split("`")[3]) == {"rounding": "gptq", "teacher": "teacher", "losses": [{"of": "here"}]}
    assert yaml.safe_load(line.split("`")[5]) == {"scheme": "w8a8", "weight_bits": 7}
    assert "secret" not in found


@pytest.mark.parametrize("name", [PLACE, "team/model"])
def test_snippets_load_what_was_published(name: str) -> None:
    assert f'```python\nload("{name}")\n```' in str(card(published(name=name)))


def test_an_unknown_licence_is_said_to_be_unknown() -> None:
    unknown = replace(ORIGIN, licence=UNKNOWN, base=None, source="the folder `bert`", dataset=None)
    found = str(card(replace(published(), origin=unknown)))
    assert front(found)["license"] == "unknown"
    assert {"base_model", "base_model_relation", "datasets"} & front(found).keys() == set()
    assert front(found)["model-index"][0]["results"][0]["dataset"] == {"name": "the evaluation rows of the run", "type": "custom"}
    assert "Find out the licence" in found
