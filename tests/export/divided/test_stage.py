"""`export.tensor_parallel`: what the stage writes, checks, tells and refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compress.report.sections.divided import divided as section
from export.divided import proof
from export.divided.rank import folder_of, read_division
from export.export import Export
from export.parity.parity import ParityError
from foundation.artifacts import exported
from foundation.artifacts.artifact import Artifact
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from tests.export import sentiment
from tests.foundation import tiny_gpt
from tests.plain_reports import contents
from tests.problems import raises_problem

pytestmark = pytest.mark.whole


def test_the_last_variant_is_divided_and_checked(tmp_path: Path) -> None:
    context = sentiment.context(tmp_path, {"baseline": sentiment.checkpoint(), "quantize": sentiment.quantized()})
    variant = Export(tensor_parallel=2)._divided(context, tmp_path)
    assert variant is not None
    found = variant.written()
    assert {key: found[key] for key in ("variant", "ranks", "folder", "equal", "disagreements", "max_abs")} == {
        "variant": "quantize", "ranks": 2, "folder": "quantize-tensor-parallel-2", "equal": True, "disagreements": 0, "max_abs": 0.0
    }  # fmt: skip
    assert found["rows"] == 40
    folder = folder_of(tmp_path / found["folder"], 1, 2)
    assert found["bytes"][1] == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert (folder / "tokenizer.json").is_file()
    (told,) = section(contents({"variants": [{"id": "baseline"}, {"id": "quantize", "divided": found}]}))
    assert told["id"] == "quantize"
    assert told["text"].endswith("compared with the undivided model on 40 rows: the same answers to the last bit")


def mixture(folder: Path, metrics: dict[str, Any]) -> exported.DividedVariant:
    """Divides a small Mixtral of four experts a layer over two ranks, after a stage with these metrics."""
    artifact = Artifact(tiny_gpt.checkpoint("mixtral"), {"id": "quantize", "stage": "quantize", "metrics": metrics})
    target, progress = Target(sequence_lengths=(8,)), ConsoleProgress("silent")
    context = Context("text-generation", tiny_gpt.data(), tiny_gpt.LENGTH, target, 0, progress, folder / "scratch")
    context = replace(context, checkpoints={"quantize": artifact})
    return Export(tensor_parallel=2, expert_parallel=True)._divided(context, folder)


def test_experts_are_placed_by_the_load_that_the_stage_before_measured(tmp_path: Path) -> None:
    loads = {"model.layers.0.mlp.experts": [70, 20, 5, 5], "model.layers.1.mlp.experts": [10, 10, 10, 10]}
    found = mixture(tmp_path, {"experts": loads})
    assert found.disagreements == 0
    assert (found.busiest, found.busiest_in_order) == (pytest.approx((1.5 + 1) / 2), pytest.approx((1.8 + 1) / 2))
    ranks = [read_division(folder_of(tmp_path / str(found.folder), rank, 2)) for rank in range(2)]
    assert [division.experts["model.layers.0.mlp.experts"] for division in ranks] == [(0, 3), (1, 2)]
    assert [division.experts["model.layers.1.mlp.experts"] for division in ranks] == [(0, 1), (2, 3)]
    (told,) = section(contents({"variants": [{"id": "quantize", "divided": found.written()}]}))
    assert "reads 1.25 times the tokens of the mean (1.40 times with experts in order)" in told["text"]


def test_experts_that_nobody_measured_stay_in_order(tmp_path: Path) -> None:
    found = mixture(tmp_path, {})
    assert (found.busiest, found.busiest_in_order) == (None, None)
    assert read_division(folder_of(tmp_path / str(found.folder), 1, 2)).experts["model.layers.0.mlp.experts"] == (2, 3)
    (told,) = section(contents({"variants": [{"id": "quantize", "divided": found.written()}]}))
    assert "load" not in told["text"]


def test_ranks_that_answer_otherwise_end_the_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank reads the weights of rank 0: heads 0 and 1 twice."""
    context = sentiment.context(tmp_path, {"baseline": sentiment.checkpoint(), "quantize": sentiment.quantized()})
    first, load = folder_of(tmp_path / "quantize-tensor-parallel-2", 0, 2), proof.load
    monkeypatch.setattr(proof, "load", lambda _, ranks: load(first, ranks))
    with pytest.raises(ParityError, match=r"rank-0-of-2: .* predictions differ from the undivided model"):
        Export(tensor_parallel=2)._divided(context, tmp_path)


def test_it_is_refused_before_the_run(tmp_path: Path) -> None:
    context = sentiment.context(tmp_path, {"baseline": sentiment.checkpoint()})
    config = Checkpoint(sentiment.checkpoint(), "model").config
    with raises_problem("stages.export.tensor_parallel", "3", "block 0 has 4 attention heads", "give 2"):
        Export(tensor_parallel=3).check(config, None, context)
    Export(tensor_parallel=4).check(config, None, context)


def test_exports_without_it_keep_their_cache_keys() -> None:
    assert "tensor_parallel" not in Export().model_dump()
    assert Export(tensor_parallel=2).model_dump()["tensor_parallel"] == 2
    assert "divided" not in json.dumps(Export().model_dump())
