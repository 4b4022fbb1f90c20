"""Runs whose rows name adapters: torch, the graph, engines and the server answer each row by its adapter, and never without one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.api import serve
from compress.commands.publish import publish
from compress.commands.verify import verify
from compress.pipeline import run
from compress.recipe import check
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.standalone.adapted import with_adapter
from tests import without_clocks
from tests.export import sentiment
from tests.problems import raises_problem
from tests.report_keys import undocumented
from triton_repo.client import RequestError, infer, infer_rows

TASK, NAMES = "text-classification", ("always", "has_film", "never")


def labelled(name: str, text: str) -> bool:
    """What an adapter has to learn: another question of the same texts for each."""
    return {"always": True, "has_film": "film" in text.split(), "never": False}[name]


def written(folder: Path, names: Sequence[str] = NAMES) -> Path:
    folder.mkdir()
    for seed, (split, count) in enumerate({"train": 120, "test": 60}.items()):
        random = np.random.default_rng(seed)
        texts = [" ".join(random.choice(sentiment.WORDS, random.integers(1, 12))) for _ in range(count)]
        asked = [names[index % len(names)] for index in range(count)]
        rows = [{"text": text, "shop": name, "label": int(labelled(name, text))} for text, name in zip(texts, asked, strict=True)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def recipe(folder: Path, *stages: dict[str, Any], **adapters: Any) -> Any:
    settings = {"lora": {"rank": 4, "alpha": 16}, "epochs": 6, "learning_rate": 0.05, "base": "plain", **adapters}
    return check(
        {
            "name": "tiny",
            "model": {"path": str(sentiment.checkpoint()), "task": TASK, "head": "keep"},
            "data": {"path": str(written(folder / "data")), "columns": {"adapter": "shop"}, "max_length": sentiment.LENGTH},
            "target": {"engines": ["openvino", "onnxruntime"], "batch_sizes": [1, 4], "sequence_lengths": [8, 16], "threads": 1},
            "stages": [{"quantize": {"calibration": {"rows": 64}}}, {"adapters": settings}, {"export": {}}, *stages],
            "seed": 1,
        }
    )


def entry(report: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(variant for variant in report["variants"] if variant["id"] == name)
    return found


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.usefixtures("engines_inside", "no_clocks")
def test_a_run_answers_every_row_by_its_adapter(tmp_path: Path) -> None:
    report = run(recipe(tmp_path), tmp_path / "run", progress=ConsoleProgress("silent")).report
    assert undocumented(report) == []
    last, before = entry(report, "adapters"), entry(report, "quantize")
    for backend in ("torch", "openvino", "onnxruntime"):
        cells = last["adapters"][backend]
        assert sorted(cells) == sorted(NAMES)
        assert sum(cell["n"] for cell in cells.values()) == 60
        whole = sum(cell["value"] * cell["n"] for cell in cells.values()) / 60
        assert whole == pytest.approx(last["accuracy"][backend]["value"])
    assert last["accuracy"]["torch"]["value"] > before["accuracy"]["torch"]["value"] + 0.1
    assert last["parameters"] > before["parameters"]
    assert last["precision"] == "int8"
    assert report["served"]["variant"] == "adapters"  # whatever is faster without them
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert 'id="adapters"' in page
    assert all(name in page for name in NAMES)
    assert verify(tmp_path / "run", log=lambda line: None) == []
    with raises_problem("--variant adapters", "adapters", "serve"):
        publish(tmp_path / "run", tmp_path / "published", variant="adapters", form="onnx", log=lambda line: None)
    made = next((tmp_path / "run" / "stages").glob("adapters-*"))
    again = {"name": "again", "data": {"path": str(tmp_path / "data"), "max_length": sentiment.LENGTH}, "stages": [{"quantize": {}}]}
    with raises_problem("model.path", "adapters"):
        run(check({**again, "model": {"path": str(made), "task": TASK}}), tmp_path / "again", progress=ConsoleProgress("silent"))


@pytest.mark.slow
def test_a_server_answers_mixed_batches_and_refuses_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tritonclient.grpc import InferenceServerClient

    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)
    report = run(recipe(tmp_path, {"triton_repo": {}}), tmp_path / "run", progress=ConsoleProgress("silent")).report
    told = json.loads(next((tmp_path / "run").glob("stages/triton_repo-*/triton.json")).read_text())
    assert [model["disagreements"] for model in told["models"]] == [0] * len(told["models"])
    assert sorted(entry(report, "adapters")["adapters"]["triton"]) == sorted(NAMES)
    assert verify(tmp_path / "run", live=True, log=lambda line: None) == []
    made = next((tmp_path / "run" / "stages").glob("adapters-*"))
    prepared = Checkpoint(made).preprocessor(TASK, sentiment.LENGTH, Target(sequence_lengths=(8, 16)))
    rows = [with_adapter(text, (*NAMES, "plain")[index % 4]) for index, text in enumerate(sentiment.rows(8))]
    expected = predict(load(made), prepared, rows, 8)
    with serve(tmp_path / "run") as server, InferenceServerClient(server.grpc_address) as client:
        found = infer_rows(client, "adapters-int8", rows).as_numpy("LOGITS")
        np.testing.assert_allclose(found, expected, atol=1e-3)
        one = np.stack([infer(client, "adapters-int8", row).as_numpy("LOGITS")[0] for row in rows])
        np.testing.assert_allclose(one, found, atol=1e-5)
        others = np.stack([infer(client, "adapters-int8", with_adapter(str(row), "always")).as_numpy("LOGITS")[0] for row in rows])
        assert np.abs(others - found).max(axis=1)[1] > 1e-2
        for wrong in (with_adapter("good", "sometimes"), with_adapter("good", ""), "good"):
            with pytest.raises(RequestError) as caught:
                infer(client, "adapters-int8", wrong)
            assert all(name in str(caught.value) for name in (*NAMES, "plain"))


@pytest.mark.slow
def test_a_hard_gate_sends_each_request_to_the_expert_of_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe of docs/how-to/adapters.md: shared layers are trained and rounded, then experts in the feed-forward layers of two ids."""
    from tritonclient.grpc import InferenceServerClient

    monkeypatch.setattr("foundation.measure.latency.measure", without_clocks.measure)
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)
    ids, layers = ("has_film", "never"), ["*.intermediate.dense", "*[0-9].output.dense"]
    experts = {"lora": {"rank": 4, "alpha": 16, "layers": layers}, "epochs": 6, "learning_rate": 0.05}
    raw = {
        "name": "gated",
        "model": {"path": str(sentiment.checkpoint()), "task": TASK, "head": "new"},
        "data": {"path": str(written(tmp_path / "data", ids)), "columns": {"adapter": "shop"}, "max_length": sentiment.LENGTH},
        "target": {"engines": ["openvino", "onnxruntime"], "batch_sizes": [1, 4], "sequence_lengths": [8, 16], "threads": 1},
        "stages": [
            {"finetune": {"epochs": 2, "learning_rate": 0.003}},
            {"quantize": {"calibration": {"rows": 64}}},
            {"adapters": experts},
            {"export": {}},
            {"triton_repo": {}},
        ],
    }
    report = run(check(raw), tmp_path / "run", progress=ConsoleProgress("silent")).report
    last = entry(report, "adapters")
    assert last["precision"] == "int8"
    for backend in ("torch", "openvino", "onnxruntime", "triton"):
        assert sorted(last["adapters"][backend]) == sorted(ids)
    assert last["adapters"]["torch"]["never"]["value"] == 1.0
    made = next((tmp_path / "run" / "stages").glob("adapters-*"))
    prepared = Checkpoint(made).preprocessor(TASK, sentiment.LENGTH, Target(sequence_lengths=(8, 16)))
    rows = [with_adapter(text, ids[index % 2]) for index, text in enumerate(sentiment.rows(6))]
    model = load(made)
    with serve(tmp_path / "run") as server, InferenceServerClient(server.grpc_address) as client:
        found = infer_rows(client, "adapters-int8", rows).as_numpy("LOGITS")
        np.testing.assert_allclose(found, predict(model, prepared, rows, 6), atol=1e-3)
        with pytest.raises(RequestError, match="has_film"):
            infer(client, "adapters-int8", with_adapter("good", "another_task"))
