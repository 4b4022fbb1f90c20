"""Whole runs of the task audio-classification, on tiny models of waveforms and spectrograms: every stage, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
from foundation.core.target import Target
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.schemes.int8 import Int8Linear
from foundation.schemes.int8_convolution import Int8Convolution
from tests import tiny_sounds, without_clocks
from tests.docs.clients import ask
from tests.problems import raises_problem
from tests.report_keys import undocumented

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]

TASK = "audio-classification"
CONFIGS = {
    "waveform": tiny_sounds.waveform_config(layers=2),
    "masked waveform": tiny_sounds.waveform_config(layers=2, masked=True),
    "masked hubert": tiny_sounds.waveform_config("hubert", layers=2, masked=True),
    "spectrogram": tiny_sounds.spectrogram_config(layers=2),
}
LEAST_ACCURACY = {"waveform": 0.5, "spectrogram": 0.6}
"""Of three classes, after training of a second; the masked ones reach 1."""


def recipe(folder: Path, kind: str, stages: list[Any], **changes: Any) -> Any:
    data = folder if (folder / "train").exists() else tiny_sounds.folder(folder / "data")
    given: dict[str, Any] = {"path": str(data)}
    target: dict[str, Any] = {"engines": ["openvino", "onnxruntime"], "batch_sizes": [1, 2], "threads": 1}
    if kind != "spectrogram":
        given, target = given | {"max_seconds": 0.12}, target | {"sequence_lengths": [480, 960]}
    whole = {"name": "tiny", "model": tiny_sounds.model(CONFIGS[kind]), "data": given, "target": target, "stages": stages, "seed": 1}
    return check({**whole, **changes})


FINETUNE = {"finetune": {"epochs": 10, "learning_rate": 3e-3, "batch_size": 8}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_run_from_training_to_the_repository(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)
    stages = [
        FINETUNE,
        {"distill": {"student": {"layers": 1}, "loss": "minilm", "epochs": 1, "batch_size": 8}},
        {"prune": {"sparsity": 0.3, "rows": 32, "multiple_of": 8, "recover": {"epochs": 1, "distill": True, "batch_size": 8}}},
        {"quantize": {"mode": "qat", "convolutions": True, "calibration": {"rows": 32}, "qat": {"epochs": 1, "batch_size": 8}}},
        {"export": {}},
        {"triton_repo": {"serve": False}},
    ]
    report = run(recipe(tmp_path, kind, stages), tmp_path / "run", progress=ConsoleProgress("quiet")).report
    assert [variant["id"] for variant in report["variants"]] == ["finetune", "distill", "prune", "quantize"]
    for variant in report["variants"]:
        assert variant["accuracy"]["torch"]["n"] == 40
        assert variant["accuracy"]["torch"]["value"] >= LEAST_ACCURACY.get(kind, 0.9)
    assert undocumented(report) == []
    exported = json.loads(next((tmp_path / "run").glob("stages/export-*/export.json")).read_text())
    for build in exported["builds"]:
        for engine in build["engines"]:
            if engine["engine"] in ("openvino", "onnxruntime"):
                assert engine["runnable"], engine["reason"]
                assert engine["int8_share"] == (0 if build["precision"] == "fp32" else pytest.approx(0.93, abs=0.08))
    quantized = load(next((tmp_path / "run").glob("stages/quantize-*")))
    layers = [module for module in quantized.modules() if isinstance(module, Int8Linear | Int8Convolution)]
    assert sum(isinstance(module, Int8Convolution) for module in layers) == (1 if kind == "spectrogram" else 3)
    assert len(evaluation_split(tmp_path / "run")) == 40  # read again, as load tests do
    lines = [json.loads(line) for line in (tmp_path / "run" / "flips.jsonl").read_text().splitlines()]
    assert all(line["input"].startswith("sound of ") for line in lines)
    served = next((tmp_path / "run").glob("stages/triton_repo-*/model_repository")) / "quantize-int8"
    assert (served / "1" / "sound.py").exists()
    assert sorted(path.name for path in (served / "warmup").iterdir()) == (
        ["400.AUDIO"] if kind == "spectrogram" else ["480.AUDIO", "960.AUDIO"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked waveform", "spectrogram"])
def test_a_short_run_ends_in_integers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    stages = [FINETUNE, {"quantize": {"convolutions": True, "calibration": {"rows": 32}}}, {"export": {}}]
    target = {"engines": ["onnxruntime"], "batch_sizes": [1], "threads": 1}
    report = run(recipe(tmp_path, kind, stages, target=target), tmp_path / "run", progress=ConsoleProgress("silent")).report
    for variant in report["variants"]:
        assert variant["accuracy"]["torch"]["n"] == 40
        assert variant["accuracy"]["onnxruntime"]["value"] >= LEAST_ACCURACY.get(kind, 0.9)
    exported = json.loads(next((tmp_path / "run").glob("stages/export-*/export.json")).read_text())
    integers = next(build for build in exported["builds"] if build["precision"] == "int8")
    assert [engine["int8_share"] > 0.85 for engine in integers["engines"] if engine["engine"] == "onnxruntime"] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["waveform", "masked waveform", "spectrogram"])
def test_a_served_model_answers_as_its_engine(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    stages = [FINETUNE, {"quantize": {"convolutions": True, "calibration": {"rows": 32}}}, {"export": {}}, {"triton_repo": {}}]
    run(recipe(tmp_path, kind, stages), tmp_path / "run", progress=ConsoleProgress("quiet"))
    told = json.loads(next((tmp_path / "run").glob("stages/triton_repo-*/triton.json")).read_text())
    assert [model["disagreements"] for model in told["models"]] == [0] * len(told["models"])
    assert verify(tmp_path / "run", live=True, log=lambda line: None) == []
    shutil.copyfile(sorted((tmp_path / "data").rglob("*.wav"))[0], tmp_path / "sound.wav")
    with serve(tmp_path / "run") as server:
        ask("docs/tutorials/audio.md", server, tmp_path)


def test_answers_do_not_depend_on_the_rest_of_the_batch_nor_on_padding_with_a_mask(tmp_path: Path) -> None:
    run(recipe(tmp_path, "masked waveform", [{"finetune": {"epochs": 1}}]), tmp_path / "run", progress=ConsoleProgress("silent"))
    folder = next((tmp_path / "run").glob("stages/finetune-*"))
    model = load(folder)
    rows = [tiny_sounds.encoded(tiny_sounds.wave("low", seconds, np.random.default_rng(0))) for seconds in (0.05, 0.08, 0.12)]
    prepared = Checkpoint(folder).preprocessor(TASK, 960, Target(sequence_lengths=()))

    def logits(chosen: list[bytes], length: int | None) -> torch.Tensor:
        with torch.inference_mode():
            features = {name: torch.from_numpy(value) for name, value in prepared.encode(chosen, length).items()}
            found: torch.Tensor = model(**features).logits
        return found

    alone = torch.cat([logits([row], 0) for row in rows])
    torch.testing.assert_close(logits(rows, None), alone, atol=1e-6, rtol=1e-3)
    assert (alone[0] - alone[2]).abs().max() > 1e-4


def test_lengths_are_samples(tmp_path: Path) -> None:
    def lengths(kind: str, **changes: Any) -> tuple[int, list[tuple[int, int | None]]]:
        made = in_samples(recipe(tmp_path, kind, [FINETUNE], **changes))
        return made.data.max_length, shapes(TASK, made.target)

    assert lengths("waveform") == (960, [(1, 480), (1, 960), (2, 480), (2, 960)])
    assert lengths("waveform", target={"batch_sizes": [4]}) == (960, [(4, 960)])
    assert lengths("spectrogram") == (0, [(1, None), (2, None)])


@pytest.mark.parametrize(
    ("kind", "changes", "line"),
    [
        ("waveform", {"data": {"path": "."}}, "data.max_seconds: missing; a wav2vec2 reads waveforms: give the longest sound in seconds"),
        ("waveform", {"target": {"sequence_lengths": [32, 960]}}, "32 samples given; 72 to 960 samples, at 8000 a second, are allowed"),
        ("waveform", {"target": {"sequence_lengths": [2000]}}, "2000 samples given; 72 to 960 samples, at 8000 a second, are allowed"),
        ("waveform", {"data": {"path": ".", "max_seconds": 0.001}}, "8 samples given; 72 to 8 samples, at 8000 a second, are allowed"),
        (
            "spectrogram",
            {"model": tiny_sounds.model(CONFIGS["spectrogram"]) | {"preprocessor": {"feature_extractor_type": "Wav2Vec2FeatureExtractor"}}},
            "Wav2Vec2FeatureExtractor does not fit this audio-spectrogram-transformer, which reads spectrograms of 4 frames",
        ),
        (
            "spectrogram",
            {"model": tiny_sounds.model(CONFIGS["spectrogram"]) | {"preprocessor": {"max_length": 8}}},
            "ASTFeatureExtractor does not fit this audio-spectrogram-transformer, which reads spectrograms of 4 frames",
        ),
        (
            "waveform",
            {"model": tiny_sounds.model(CONFIGS["waveform"]) | {"preprocessor": {"sampling_rate": 10}}},
            "model.preprocessor: sampling_rate: 10 given; 1000 to 384000 Hz are allowed",
        ),
        (
            "waveform",
            {"model": tiny_sounds.model(CONFIGS["waveform"]) | {"preprocessor": {"feature_extractor_type": "WhisperFeatureExtractor"}}},
            "feature_extractor_type 'WhisperFeatureExtractor' given; Wav2Vec2FeatureExtractor or ASTFeatureExtractor is allowed",
        ),
        (
            "waveform",
            {"model": tiny_sounds.model({"model_type": "whisper"})},
            "a whisper does not read sounds in a way that is supported",
        ),
    ],
)
def test_models_and_lengths_that_do_not_fit_are_refused_in_one_line(kind: str, changes: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        in_samples(recipe(tmp_path, kind, [FINETUNE], **changes))
    assert len(caught.value.lines) == 1
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ({"distill": {"student": {"layers": 1}, "augment": {}}}, f"augment: given; {TASK} does not support it"),
        ({"prune": {"granularity": ["vocabulary"], "sparsity": 0}}, "vocabulary given"),
    ],
)
def test_what_a_stage_cannot_do_is_refused_in_one_line(stage: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=line) as caught:
        run(recipe(tmp_path, "waveform", [{"finetune": {"epochs": 0.5}}, stage]), tmp_path / "run", progress=ConsoleProgress("silent"))
    assert len(caught.value.lines) == 1


def test_other_tasks_and_devices_are_refused(tmp_path: Path) -> None:
    image = {"name": "x", "model": {"path": "p", "task": "image-classification"}, "data": {"path": "p", "max_seconds": 1}, "stages": []}
    with raises_problem("data.max_seconds", "1", "image-classification", "sounds", "leave it out"):
        in_samples(check({**image, "stages": [{"quantize": {}}]}))
    stages = [FINETUNE, {"export": {}}, {"triton_repo": {}}]
    with pytest.raises(InputError, match=r"audio-classification .* target.device: cpu, or .* triton_repo"):
        recipe(tmp_path, "waveform", stages, target={"device": "cuda", "engines": ["tensorrt"]})


def test_init_writes_a_recipe_that_reads(tmp_path: Path) -> None:
    read_back = read(write_template(TASK, tmp_path / "recipe.yaml"))
    assert (read_back.model.task, read_back.data.columns.audio, read_back.data.max_seconds) == (TASK, "audio", 10.0)
    assert [stage.NAME for stage in read_back.stages] == ["finetune", "quantize", "export", "triton_repo"]
