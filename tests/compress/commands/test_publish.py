"""`compress publish` on a finished run: each format is loaded by the library that it is for, and nothing is overwritten or half written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from onnxruntime import InferenceSession
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from cli import app
from compress.api import publish
from compress.commands import publish as command
from compress.recipe import check
from foundation.artifacts.artifact import files_below
from foundation.artifacts.run_folder import open_run
from foundation.core.errors import InputError
from foundation.measure.answers import load_logits
from foundation.models.folder import Checkpoint
from tests.export import sentiment
from tests.test_multi_label import TASK, finished_run

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("engines_inside")]


@pytest.fixture(scope="module")
def folder(engines_inside: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(tmp_path_factory)


def evaluated(folder: Path, variant: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The evaluation rows, and what torch answered to them in the run."""
    run = open_run(folder)
    texts = [json.loads(line)["text"] for line in (Path(run.recipe["data"]["path"]) / "test.jsonl").read_text().splitlines()]
    prepared = Checkpoint(run.variants[variant].path).preprocessor(TASK, sentiment.LENGTH, sentiment.TARGET)
    return dict(prepared.encode(texts, 0)), load_logits(run.predictions(variant))


def test_onnx_answers_what_the_engine_of_the_run_answered(folder: Path, tmp_path: Path) -> None:
    before = {name: path.stat().st_mtime_ns for name, path in files_below(folder).items()}
    out = publish(folder, tmp_path / "out", variant="quantize", form="onnx", licence="apache-2.0")
    features, _ = evaluated(folder, "quantize")
    session = InferenceSession(out / "onnx" / "model_quantized.onnx")
    (logits,) = session.run(["logits"], features)
    recorded = load_logits(next(folder.glob("stages/export-*/quantize-int8/onnxruntime-*.safetensors")))
    np.testing.assert_allclose(logits, recorded, atol=1e-5)  # batches of another size add in another order
    found = ModelCard.load(out / "README.md")
    assert found.data.license == "apache-2.0"
    report = json.loads((folder / "report.json").read_text())["variants"][-1]
    assert found.data.eval_results[0].metric_value == report["accuracy"]["onnxruntime"]["value"]
    assert str(folder) not in found.content
    assert str(sentiment.checkpoint(1).parent) not in found.content
    assert {name: path.stat().st_mtime_ns for name, path in files_below(folder).items()} == before


def test_a_float_variant_is_a_model_of_transformers_with_the_figures_of_torch(folder: Path, tmp_path: Path) -> None:
    out = publish(folder, tmp_path / "out", variant="finetune", form="transformers")
    features, recorded = evaluated(folder, "finetune")
    model = AutoModelForSequenceClassification.from_pretrained(out)
    with torch.no_grad():
        logits = model(**{name: torch.from_numpy(value) for name, value in features.items()}).logits
    np.testing.assert_allclose(logits.numpy(), recorded, atol=1e-5)
    found = ModelCard.load(out / "README.md")
    report = json.loads((folder / "report.json").read_text())["variants"][0]
    assert found.data.eval_results[0].metric_value == report["accuracy"]["torch"]["value"]


def test_the_command_says_what_it_wrote_and_warns_of_an_unknown_licence(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["publish", str(folder), "--variant", "quantize", "--as", "transformers", str(out)])
    first, warning = done.stdout.splitlines()
    assert done.exit_code == 0
    assert first.startswith(f"{out}: ")
    assert warning.startswith("warning: the licence")
    assert ModelCard.load(out / "README.md").data.license == "unknown"


def test_nothing_is_overwritten_and_nothing_is_left_half_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, inside, link = tmp_path / "full", folder / "new", tmp_path / "link"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    link.symlink_to(full)
    for out in (full, inside, folder.parent, link):
        with pytest.raises(InputError) as caught:
            publish(folder, out, variant="quantize", form="onnx")
        assert caught.value.problems[0].key == str(out)
    assert not inside.exists()
    monkeypatch.setattr(command, "card", lambda published: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        publish(folder, tmp_path / "out", variant="quantize", form="onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "link"]
    assert [path.name for path in full.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("given", "key", "allowed"),
    [
        ({"variant": "quantise"}, "--variant quantise", "quantize"),
        ({"form": "onxx"}, "--as onxx", "did you mean 'onnx'?"),
        ({"form": "openvino"}, "--variant quantize", ""),  # the run built no such engine
        ({"licence": "Apache 2"}, "--license", "apache-2.0"),
        ({"push": "team/model"}, "--push team/model", ""),  # there is no token
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_written(
    given: dict[str, str], key: str, allowed: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(InputError) as caught:
        publish(folder, tmp_path / "out", **{"variant": "quantize", "form": "onnx", **given})
    (problem,) = caught.value.problems
    assert problem.key == key
    assert allowed in problem.allowed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("card", "given", "licence", "base"),
    [
        ("---\nlicense: mit\nbase_model: team/bert\n---\n", None, "mit", "team/bert"),
        ("---\nlicense: mit\n---\n", "apache-2.0", "apache-2.0", None),
        ("---\nlicense: [a, b]\n---\n", None, "unknown", None),
        ("---\n: : :\n---\n", None, "unknown", None),
        (None, None, "unknown", None),
    ],
)
def test_licence_and_base_model_are_those_of_the_card_of_the_model(
    card: str | None, given: str | None, licence: str, base: str | None, tmp_path: Path
) -> None:
    model = tmp_path / "bert"
    model.mkdir()
    if card is not None:
        (model / "README.md").write_text(card)
    recipe = check(
        {
            "name": "x",
            "model": {"path": str(model), "task": "text-classification"},
            "data": {"path": "team/data"},
            "stages": [{"quantize": {"rounding": "gptq"}}],
        }
    )
    found = command._origin(recipe, ("baseline", "quantize"), given)
    assert (found.licence, found.base, found.dataset) == (licence, base, None)
    assert found.steps == (("quantize", "quantize", {"rounding": "gptq"}),)
    assert str(tmp_path) not in found.source


def test_an_id_of_the_hub_was_downloaded_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert not command._is_of_hub("team/bert", "model")  # a relative path, as far as anybody knows
    (tmp_path / "models--team--bert").mkdir()
    assert command._is_of_hub("team/bert", "model")
    assert not command._is_of_hub("team/bert", "dataset")
    assert not command._is_of_hub(str(tmp_path), "model")
