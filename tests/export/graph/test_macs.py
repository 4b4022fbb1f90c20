import onnx
import pytest

import export.graph.onnx
from export.graph.macs import count_macs
from export.graph.onnx import export_float
from export.graph.qdq import insert_qdq
from foundation.artifacts.graph import Graph
from foundation.models.folder import Checkpoint
from foundation.models.size import count
from tests.export import half_graphs
from tests.export import tiny_checkpoints as tiny
from tests.seldom import seldom

pytestmark = pytest.mark.whole


@pytest.mark.parametrize(("batch", "sequence"), [(1, 2), (1, 32), (3, 17)])
def test_bert_formula(batch, sequence):
    gemms = count_macs(Graph(tiny.exported("bert")[1]), batch, sequence)
    hidden, wide, labels = 16, 24, 3
    first = sequence * (4 * hidden * hidden + 2 * hidden * wide)
    last = (
        2 * sequence * hidden * hidden + 2 * hidden * hidden + 2 * hidden * wide
    )  # keys and values of all tokens, the rest of the first one
    weights = first + last + hidden * hidden + hidden * labels
    attention = 2 * sequence * sequence * hidden + 2 * sequence * hidden
    assert sum(gemm.macs for gemm in gemms if gemm.kind == "weight") == batch * weights
    assert sum(gemm.macs for gemm in gemms if gemm.kind == "attention") == batch * attention


def test_names_and_kinds():
    gemms = {gemm.name: gemm for gemm in count_macs(Graph(tiny.exported("bert")[1]), 1, 8)}
    assert len(gemms) == 2 * 8 + 2
    assert gemms["bert.encoder.layer.1.intermediate.dense"].kind == "weight"
    assert gemms["bert.encoder.layer.0.intermediate.dense"].macs == 8 * 16 * 24
    assert gemms["bert.encoder.layer.1.intermediate.dense"].macs == 16 * 24
    assert gemms["bert.encoder.layer.0.attention.self/qk"].kind == "attention"
    assert gemms["bert.encoder.layer.0.attention.self/pv"].macs == 8 * 8 * 16
    assert gemms["classifier"].node == "classifier/Gemm"


def test_image_model_and_its_patch_embedding():
    gemms = {gemm.name: gemm for gemm in count_macs(Graph(tiny.exported("vit")[1]), 2, None)}
    assert gemms["vit.embeddings.patch_embeddings.projection"].macs == 2 * 9 * 16 * (3 * 4 * 4)
    assert gemms["vit.embeddings.patch_embeddings.projection"].kind == "weight"
    assert gemms["classifier"].macs == 2 * 16 * 3


@pytest.mark.parametrize(
    "family", seldom([family for family in tiny.CONFIGS if family not in tiny.RELATIVES], ("albert", "distilbert", "modernbert"))
)
def test_total_is_that_of_the_torch_model(family):
    """Where all tokens of the last layer are computed."""
    folder, _ = tiny.exported(family)
    task = tiny.preprocessor(family).task
    total = sum(gemm.macs for gemm in count_macs(Graph(tiny.whole(family)), 1, None if family in tiny.IMAGES else 19))
    assert total == count(tiny.load(folder, family), task, 19).macs


@pytest.mark.slow
def test_a_module_that_runs_twice_counts_twice():
    gemms = count_macs(Graph(tiny.exported("albert")[1]), 1, 8)
    assert len({gemm.node for gemm in gemms}) == len(gemms) > len({gemm.name for gemm in gemms})


def test_qdq_graph_counts_the_same(tmp_path):
    folder, path = tiny.exported("vit")
    scales = dict.fromkeys(tiny.linears(tiny.load(folder, "vit")), 0.02)
    quantized = tiny.quantize(folder, "vit", scales, tmp_path / "checkpoint")
    floating = export_float(Checkpoint(quantized), tiny.preprocessor("vit"), tmp_path / "float.onnx")
    assert count_macs(Graph(insert_qdq(Graph(floating), Checkpoint(quantized), tmp_path / "int8.onnx")), 2, None) == count_macs(
        Graph(path), 2, None
    )


def test_weights_in_a_file_beside(tmp_path, monkeypatch):
    _, path = tiny.exported("bert")
    monkeypatch.setattr(export.graph.onnx, "EXTERNAL_ABOVE", 0)
    beside = export.graph.onnx.save(onnx.load(path), tmp_path / "model.onnx")
    assert count_macs(Graph(beside), 1, 8) == count_macs(Graph(path), 1, 8)


def test_weights_that_are_dequantized_and_cast_are_weights(tmp_path):
    halved = half_graphs.halved(half_graphs.quantized("gpt2")).model
    onnx.save(halved, str(tmp_path / "half.onnx"))
    found, expected = (count_macs(Graph(path), 2, 16) for path in (tmp_path / "half.onnx", half_graphs.quantized("gpt2")))
    assert found == expected
