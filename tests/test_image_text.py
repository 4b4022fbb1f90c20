"""Whole runs of the task image-text, on tiny models with two towers: from training to two served models, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.api import serve
from compress.commands.init import write_template
from compress.commands.load_test import evaluation_split
from compress.commands.verify import verify
from compress.pipeline import run
from compress.recipe import check, read
from compress.run.implicit import shapes
from compress.run.lengths import in_samples
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.measure.answers import load_logits
from foundation.schemes.int8 import has_vnni
from tests import tiny_towers, without_clocks
from tests.docs.clients import ask
from tests.problems import raises_problem
from tests.report_keys import undocumented
from tests.tiny_towers import LENGTH, TASK

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

FINETUNE = {"finetune": {"epochs": 12, "learning_rate": 3e-3, "batch_size": 32}}


def recipe(folder: Path, stages: list[Any], kind: str = "clip", **changes: Any) -> Any:
    data = folder / "data"
    return check(tiny_towers.recipe(data if data.exists() else tiny_towers.folder(data), stages, kind, **changes))


def triton(folder: Path) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads(next(folder.glob("stages/triton_repo-*/triton.json")).read_text())["models"]
    return told


@pytest.mark.slow
def test_a_short_run_is_judged_in_torch_and_in_integers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    stages = [FINETUNE, {"quantize": {}}]
    report = run(recipe(tmp_path, stages), tmp_path / "run", progress=ConsoleProgress("silent")).report
    assert [variant["id"] for variant in report["variants"]] == ["finetune", "quantize"]
    for variant in report["variants"]:
        cell = variant["accuracy"]["torch"]
        assert cell["n"] == 42
        assert cell["low"] <= cell["value"] <= cell["high"]
        assert cell["value"] >= 0.9
    assert undocumented(report) == []
    lines = [json.loads(line) for line in (tmp_path / "run" / "flips.jsonl").read_text().splitlines()]
    assert all(line["input"].startswith("image of ") and {line["before"], line["after"]} <= {*tiny_towers.COLOURS} for line in lines)
    losses = json.loads(next((tmp_path / "run").glob("stages/finetune-*/manifest.json")).read_text())["metrics"]["losses"]
    assert losses[-1]["contrastive"] < losses[0]["contrastive"] - 0.3  # texts occur several times in a batch: it cannot be 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_two_served_models_answer_as_their_engine(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)
    target = {"engines": ["openvino", "onnxruntime"], "batch_sizes": [1, 2], "threads": 1}
    exact = has_vnni()  # elsewhere OpenVINO's products of two int8 activations saturate, which the export refuses
    stages = [FINETUNE, {"quantize": {"attention": exact, "residual": True}}, {"export": {}}, {"triton_repo": {}}]
    folder = tmp_path / "run"
    report = run(recipe(tmp_path, stages, kind, target=target), folder, progress=ConsoleProgress("quiet")).report
    assert undocumented(report) == []
    names = [f"{build}-{tower}" for build in ("finetune-fp32", "quantize-int8") for tower in ("image", "text")]
    assert [model["model"] for model in report["triton"]["models"]] == names
    repository = folder / "model_repository"
    for name in names:
        config = (repository / name / "config.pbtxt").read_text()
        assert ('"IMAGE"' if name.endswith("image") else '"TEXT"') in config
        assert '"VECTOR"' in config
        assert (repository / name / "1" / "tokenizer.json").exists() == name.endswith("text")
    labels = evaluation_split(folder).labels
    for image, text in zip(triton(folder)[::2], triton(folder)[1::2], strict=True):
        assert image["disagreements"] == text["disagreements"] == 0
        assert (image["metrics"], image["predictions"]) == (text["metrics"], text["predictions"])
        served = load_logits(next(folder.glob(f"stages/triton_repo-*/{text['predictions']}")))
        exported = json.loads(next(folder.glob("stages/export-*/export.json")).read_text())
        entry = next(
            engine
            for build in exported["builds"]
            if (build["variant"], build["precision"]) == (image["variant"], image["precision"])
            for engine in build["engines"]
            if (engine["engine"], engine["mode"]) == (image["engine"], image["mode"])
        )
        engine = load_logits(next(folder.glob(f"stages/export-*/{entry['predictions']}")))
        np.testing.assert_allclose(served, engine, atol=1e-3)
        cosines, own = labels.values(served)
        assert image["metrics"]["accuracy"] == pytest.approx(float((cosines.argmax(axis=1) == own).mean()))
        assert image["metrics"]["accuracy"] >= (0.9 if kind == "clip" else 0.8)
    assert verify(folder, live=True, log=lambda line: None) == []
    readme = (repository / "README.md").read_text()
    assert readme.count("(serve this one)") == 2
    (tmp_path / "picture.png").write_bytes(tiny_towers.image("red", np.random.default_rng(3)))
    with serve(folder) as server:
        printed = ask("docs/tutorials/image-text.md", server, tmp_path)
    assert "a photo of a" in printed[0]
    assert json.loads(printed[1])["outputs"][0]["name"] == json.loads(printed[2])["outputs"][0]["name"] == "VECTOR"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a16"])
def test_other_schemes_quantize_both_towers(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    stages = [FINETUNE, {"quantize": {"scheme": scheme}}, {"export": {}}]
    report = run(recipe(tmp_path, stages), tmp_path / "run", progress=ConsoleProgress("silent")).report
    last = report["variants"][-1]
    assert last["accuracy"]["onnxruntime"]["value"] >= 0.9
    layers = {layer["name"]: layer["precision"] for layer in last["int8_layers"]}
    for tower in ("text_model", "vision_model"):
        assert layers[f"{tower}.encoder.layers.0.mlp.fc1"] != "fp32"


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ({"distill": {"student": {"layers": 1}}}, "stages.distill: distill given; models of image-text have two towers, which finetune, "),
        ({"prune": {"sparsity": 0.3}}, "stages.prune: prune given; models of image-text have two towers"),
        ({"sparsify": {"sparsity": 0.5}}, "stages.sparsify: sparsify given; models of image-text have two towers"),
        ({"quantize": {"mode": "qat"}}, "stages.quantize.mode: qat given; .* give mode: ptq"),
        ({"quantize": {"mode": "auto"}}, "stages.quantize.mode: auto given; .* give mode: ptq"),
    ],
)
def test_stages_of_one_stack_are_refused_in_one_line(stage: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=line) as caught:
        recipe(tmp_path, [FINETUNE, stage])
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize(
    ("changes", "stages", "line"),
    [
        (
            {"target": {"engines": ["tensorrt"]}},
            [],
            "target.engines: tensorrt given; image-text runs in openvino, onnxruntime or torch: leave it out",
        ),
        (
            {"target": {"engines": ["onnxruntime"], "device": "cuda"}},
            [{"export": {}}, {"triton_repo": {}}],
            "it serves image-text on the cpu alone: give target.device: cpu, or leave triton_repo out",
        ),
        (
            {"search": {"space": {"stages.finetune.epochs": [1, 2]}}},
            [],
            "search: given; its candidates are models of one tower: leave it out",
        ),
        (
            {"model": {"path": "owner/model", "task": TASK, "head": "new"}, "tokenizer": None},
            [],
            "model.head: new given; models of image-text have none, and would lose all weights: leave it out",
        ),
        ({}, [{"export": {}}, {"triton_repo": {"tune": {}}}], "tune: .*two models are served, of which it would tune one: leave it out"),
    ],
)
def test_other_targets_and_settings_are_refused(changes: dict[str, Any], stages: list[Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=line):
        recipe(tmp_path, [FINETUNE, *stages], **changes)


def test_lengths_are_those_that_the_text_tower_reads(tmp_path: Path) -> None:
    def lengths(kind: str, **target: Any) -> list[tuple[int, int | None]]:
        made = in_samples(recipe(tmp_path, [FINETUNE], kind, target={"batch_sizes": [2], **target}))
        return shapes(TASK, made.target)

    assert lengths("clip") == [(2, None), (2, LENGTH)]  # the usual 32 and 128 are too long
    assert lengths("clip", sequence_lengths=[8, LENGTH]) == [(2, None), (2, 8), (2, LENGTH)]
    assert lengths("siglip") == [(2, None), (2, LENGTH)]
    with raises_problem("target.sequence_lengths", "32", "up to 24 tokens (data.max_length)"):
        lengths("clip", sequence_lengths=[8, 32])
    with raises_problem("target.sequence_lengths", "8", "24 tokens alone (data.max_length)"):
        lengths("siglip", sequence_lengths=[8, 24])


def test_images_that_are_none_are_refused_with_their_place(tmp_path: Path) -> None:
    made = recipe(tmp_path, [FINETUNE])
    file = next((tmp_path / "data" / "train" / "red").iterdir())
    file.write_bytes(b"no image")
    with pytest.raises(InputError, match=rf"{file.name}.*PNG or JPEG") as caught:
        run(made, tmp_path / "run", progress=ConsoleProgress("silent"))
    assert len(caught.value.lines) == 1


def test_init_writes_a_recipe_that_reads(tmp_path: Path) -> None:
    written = write_template(TASK, tmp_path / "recipe.yaml")
    read_back = read(written)
    assert (read_back.model.task, read_back.data.prompts, read_back.data.max_length) == (TASK, ("a photo of a {}",), 77)
    assert [stage.NAME for stage in read_back.stages] == ["quantize", "export", "triton_repo"]
    assert not any(word in written.read_text() for word in ("distill", "prune", "qat", "tensorrt"))
