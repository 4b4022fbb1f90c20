"""Whole runs of the task image-text-retrieval, on digits with captions: from training to two served models, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.commands.init import write_template
from compress.commands.load_test import evaluation_split
from compress.commands.verify import verify
from compress.pipeline import run
from compress.recipe import check, read
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.labels import captions
from foundation.measure.answers import load_logits
from tests import tiny_captions, without_clocks
from tests.report_keys import undocumented
from tests.tiny_captions import TASK

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

FINETUNE = {"finetune": {"epochs": 12, "learning_rate": 3e-3, "batch_size": 64}}
RIGHT = 0.3
"""Mean recall from which on captions are found: about 12 of 120 images are of one digit, so that the best is near 0.45 and chance 0.05."""


def recipe(folder: Path, stages: list[Any], kind: str = "clip", **changes: Any) -> Any:
    return check(tiny_captions.recipe(tiny_captions.folder(folder / "data"), stages, kind, **changes))


@pytest.mark.slow
def test_a_short_run_is_judged_by_recall_in_torch_and_in_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    report = run(recipe(tmp_path, [FINETUNE, {"quantize": {}}]), tmp_path / "run", progress=ConsoleProgress("silent")).report
    assert [variant["id"] for variant in report["variants"]] == ["finetune", "quantize"]
    assert report["metric"] == {"name": "mean_recall", "higher_is_better": True, "chance": report["metric"]["chance"]}
    for variant in report["variants"]:
        cell = variant["accuracy"]["torch"]
        assert list(variant["metrics"]["torch"]) == list(captions.FIGURES)
        assert cell["n"] == 120
        assert cell["low"] <= cell["value"] <= cell["high"]
        assert cell["value"] >= RIGHT
        assert variant["vectors"]["torch"]["top10_overlap"] > 0.5
    assert report["variants"][0]["vectors"]["torch"]["top10_overlap"] == 1
    assert undocumented(report) == []
    page = (tmp_path / "run" / "report.html").read_text()
    assert "text_to_image_recall@10" in page
    data = evaluation_split(tmp_path / "run")
    for line in map(json.loads, (tmp_path / "run" / "flips.jsonl").read_text().splitlines()):
        asked_by_image = isinstance(data.rows[line["row"]], bytes)
        assert line["input"].startswith(f"image of row {line['row']}: ") == asked_by_image
        assert line["before"].startswith("image of row ") != asked_by_image
        assert line["before"] != line["after"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_two_served_models_answer_as_their_engine(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)
    target = {"engines": ["openvino", "onnxruntime"], "batch_sizes": [1, 2], "threads": 1}
    stages = [FINETUNE, {"quantize": {}}, {"export": {}}, {"triton_repo": {}}]
    folder = tmp_path / "run"
    report = run(recipe(tmp_path, stages, kind, target=target), folder, progress=ConsoleProgress("quiet")).report
    assert undocumented(report) == []
    models = json.loads(next(folder.glob("stages/triton_repo-*/triton.json")).read_text())["models"]
    assert [model["model"] for model in models] == [
        f"{build}-{tower}" for build in ("finetune-fp32", "quantize-int8") for tower in ("image", "text")
    ]
    labels = evaluation_split(folder).labels
    exported = json.loads(next(folder.glob("stages/export-*/export.json")).read_text())
    for image, text in zip(models[::2], models[1::2], strict=True):
        assert image["disagreements"] == text["disagreements"] == 0
        assert (image["n"], image["metrics"]) == (120, text["metrics"])
        served = load_logits(next(folder.glob(f"stages/triton_repo-*/{text['predictions']}")))
        assert len(served) == len(labels)  # the whole evaluation split
        build = next(one for one in exported["builds"] if (one["variant"], one["precision"]) == (image["variant"], image["precision"]))
        entry = next(one for one in build["engines"] if (one["engine"], one["mode"]) == (image["engine"], image["mode"]))
        engine = load_logits(next(folder.glob(f"stages/export-*/{entry['predictions']}")))
        np.testing.assert_allclose(served, engine, atol=1e-3)
        assert image["metrics"]["mean_recall"] == pytest.approx(captions.Captions.METRICS["mean_recall"](*labels.values(served)))
        assert image["metrics"]["mean_recall"] >= (RIGHT if kind == "clip" else 0.2)
    assert verify(folder, live=True, log=lambda line: None) == []


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ({"distill": {"student": {"layers": 1}}}, f"stages.distill: distill given; models of {TASK} have two towers, which finetune, "),
        ({"quantize": {"mode": "qat"}}, "stages.quantize.mode: qat given; .* give mode: ptq"),
    ],
)
def test_stages_of_one_stack_are_refused_in_one_line(stage: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=line) as caught:
        check(tiny_captions.recipe(tmp_path, [FINETUNE, stage]))
    assert len(caught.value.lines) == 1


def test_init_writes_a_recipe_that_reads(tmp_path: Path) -> None:
    written = write_template(TASK, tmp_path / "recipe.yaml")
    back = read(written)
    assert (back.model.task, back.data.columns.text, back.data.prompts, back.data.max_length) == (TASK, "caption", None, 77)
    assert [stage.NAME for stage in back.stages] == ["quantize", "export", "triton_repo"]
