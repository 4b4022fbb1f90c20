"""A recipe from zeros to int8, on a tiny BERT: the zeros are counted in the integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from compress.commands.list import catalogue
from compress.commands.plan import describe
from compress.pipeline import run
from compress.recipe import Recipe, check, dump
from foundation.artifacts.run_folder import open_run
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.models.checkpoint import load
from tests import without_clocks
from tests.export import sentiment
from tests.prune import small_runs

pytestmark = [pytest.mark.whole, pytest.mark.slow, pytest.mark.usefixtures("engines_inside")]

SPARSIFY: dict[str, Any] = {"pattern": "2:4", "rows": 32, "recover": {"epochs": 0.5, "learning_rate": 1e-3}}
STAGES: list[dict[str, Any]] = [
    {"sparsify": SPARSIFY},
    {"quantize": {"calibration": {"rows": 64}, "rounding": "gptq"}},
]


def recipe(folder: Path, stages: list[dict[str, Any]]) -> Recipe:
    return small_runs.recipe(folder, "sparse", sentiment.rows(150), ["onnxruntime"], stages)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("sparse")
    asked = recipe(folder, [*STAGES, {"export": {}}])
    assert "sparsify" in describe(asked, folder / "run")
    assert check(dump(asked)) == asked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foundation.measure.latency.measure", without_clocks.measure)
        return run(asked, folder / "run", progress=ConsoleProgress("quiet"))


def test_the_zeros_are_in_the_integers(outcome: Any) -> None:
    assert [variant["id"] for variant in outcome.report["variants"]] == ["baseline", "sparsify", "quantize"]
    baseline, sparse = outcome.report["variants"][:2]
    assert (sparse["parameters"], sparse["macs"]) == (baseline["parameters"], baseline["macs"])  # no shape has changed
    made = open_run(outcome.folder).artifacts["sparsify"].metrics
    assert (made["pattern"], made["asked"], made["sparsity"]) == ("2:4", 0.5, 0.5)
    assert len(made["recovery"]["losses"]) == 1
    quantized = load(open_run(outcome.folder).artifacts["quantize"].path)
    integers = [codes for codes in quantized.state_dict().values() if codes.dtype == torch.int8 and codes.dim() == 2]
    assert len(integers) == len(made["layers"])
    for codes_OI in integers:
        assert float((codes_OI == 0).float().mean()) >= 0.5
        assert int((codes_OI.reshape(-1, 4) != 0).sum(dim=1).max()) <= 2


def summed_over(graph: onnx.GraphProto) -> list[np.ndarray]:
    """Returns the int8 weights of all products, `[K, N]`: the first axis is summed over, and TensorRT looks for 2:4 along it."""
    made = {output: node for node in graph.node for output in node.output}
    values = {initializer.name: numpy_helper.to_array(initializer) for initializer in graph.initializer}
    found = []
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm"):
            continue
        turned, name = any(attribute.name == "transB" and attribute.i for attribute in node.attribute), node.input[1]
        while name in made and made[name].op_type in ("DequantizeLinear", "Transpose"):
            turned, name = turned != (made[name].op_type == "Transpose"), made[name].input[0]
        if name in values and values[name].dtype == np.int8:
            found.append(values[name].T if turned else values[name])
    return found


def test_they_lie_in_the_graph_as_tensorrt_takes_them(outcome: Any) -> None:
    made = open_run(outcome.folder).artifacts["sparsify"].metrics
    graphs = [onnx.load(path).graph for path in outcome.folder.glob("stages/export-*/quantize-int8/*.onnx")]
    assert graphs
    for graph in graphs:
        weights = [codes for codes in summed_over(graph) if float((codes == 0).mean()) >= 0.5]
        assert len(weights) == len(made["layers"])
        for codes_KN in weights:
            assert int((codes_KN.T.reshape(-1, 4) != 0).sum(axis=1).max()) <= 2


def test_it_may_come_in_any_order_with_prune_and_distill_but_not_after_quantize(tmp_path: Path) -> None:
    stages: list[dict[str, Any]] = [{"sparsify": {}}, {"prune": {}}, {"distill": {}}, {"sparsify": {"id": "again"}}, {"quantize": {}}]
    assert [stage.id for stage in recipe(tmp_path, stages).stages] == ["sparsify", "prune", "distill", "again", "quantize"]
    with pytest.raises(InputError, match=r"stages.sparsify: sparsify cannot follow quantize"):
        recipe(tmp_path, [{"quantize": {}}, {"sparsify": {}}])


def test_it_is_listed() -> None:
    assert "sparsify      Sets weights in the blocks' matrices to zero" in catalogue("stages")
    assert "sparsify.method: magnitude, wanda, sparsegpt, movement, lasso" in catalogue("methods")
