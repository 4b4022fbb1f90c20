import logging
import os
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer
from torch.onnx._internal.exporter._registration import ONNXRegistry
from transformers import AutoModelForSequenceClassification

import export.graph.onnx
from export.graph.onnx import export_float, module_of
from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor
from tests.export import tiny_checkpoints as tiny
from tests.seldom import seldom
from tests.traced_once import really

pytestmark = pytest.mark.whole


def run(path: Path, features: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options).run(["logits"], features)[0]


@pytest.mark.first(1)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_equals_torch_at_every_shape(family):
    folder, path = tiny.exported(family)
    model = tiny.load(folder, family)
    for batch, length in ((1, 2), (1, tiny.LENGTH), (3, 13), (4, 16), (7, 7)):
        features = tiny.features(family, batch, length)
        with torch.no_grad():
            expected = model(**{name: torch.from_numpy(value) for name, value in features.items()}).logits.numpy()
        logits = run(path, features)
        assert logits.dtype == np.float32
        assert np.abs(expected).max() > 0.5  # or a difference would prove nothing
        np.testing.assert_allclose(logits, expected, atol=1e-4, err_msg=f"{family} {batch} x {length}")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_inputs_and_output(family):
    _, path = tiny.exported(family)
    graph = onnx.load(path).graph
    assert tuple(value.name for value in graph.input) == tiny.preprocessor(family).input_names
    assert [value.name for value in graph.output] == ["logits"]
    for value in graph.input:
        tensor = value.type.tensor_type
        dims = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
        if family in tiny.IMAGES:
            assert (tensor.elem_type, dims) == (onnx.TensorProto.FLOAT, ["batch", 3, 12, 12])
        else:
            assert (tensor.elem_type, dims) == (onnx.TensorProto.INT64, ["batch", "sequence"])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_graph_is_tidy(family):
    folder, path = tiny.exported(family)
    model = onnx.load(path)
    graph, used = model.graph, {name for node in model.graph.node for name in node.input}
    assert not graph.value_info
    assert not model.functions
    assert {tensor.name for tensor in graph.initializer} <= used
    assert {entry.key for node in graph.node for entry in node.metadata_props} == {"module"}
    assert all(module_of(node) for node in graph.node if node.op_type in export.graph.onnx.GEMMS)
    names = [node.name for node in graph.node]
    assert len(names) == len(set(names))
    for text in (os.getcwd(), str(folder), "site-packages", "torch.onnx"):
        assert text.encode() not in path.read_bytes()


@pytest.mark.parametrize("family", seldom(["bert", "electra", "distilbert", "roberta", "vit", "deit"], tiny.RELATIVES))
def test_attention_is_plain(family):
    graph = onnx.load(tiny.exported(family)[1]).graph
    operations = Counter(node.op_type for node in graph.node)
    assert operations["Where"] == operations["IsNaN"] == operations["If"] == 0
    layers = 2 if family == "bert" else 1
    assert operations["Softmax"] == layers
    assert operations["Transpose"] == 4 * layers + (family in tiny.IMAGES)  # q, k, v, output; and the patches


def test_gemms_are_named_by_module():
    graph = onnx.load(tiny.exported("bert")[1]).graph
    layer = "bert.encoder.layer.1"
    expected = [f"{layer}.attention.self.{part}/MatMul" for part in ("query", "key", "value")]
    expected += [f"{layer}.attention.self/qk", f"{layer}.attention.self/pv"]
    expected += [f"{layer}.attention.output.dense/MatMul", f"{layer}.intermediate.dense/MatMul", f"{layer}.output.dense/MatMul"]
    expected += ["bert.pooler.dense/Gemm", "classifier/Gemm"]
    gemms = [node for node in graph.node if node.op_type in export.graph.onnx.GEMMS]
    assert [node.name for node in gemms[8:]] == expected
    assert [node.input[1] for node in gemms[8:11]] == [f"{layer}.attention.self.{part}.weight" for part in ("query", "key", "value")]


def test_mask_decides_what_is_seen():
    _, path = tiny.exported("bert")
    features = tiny.features("bert", 2, 12)
    logits = run(path, features)
    hidden = features["attention_mask"] == 0
    other = {**features, "input_ids": np.where(hidden, 59, features["input_ids"])}
    np.testing.assert_array_equal(run(path, other), logits)
    seen = {**other, "attention_mask": np.ones_like(features["attention_mask"])}
    assert np.abs(run(path, seen) - logits)[1].max() > 1e-3


@pytest.mark.slow
def test_a_second_trace_gives_the_same_bytes_says_nothing_and_leaves_the_loggers_alone(tmp_path, capfd, monkeypatch):
    really(monkeypatch)
    folder, path = tiny.exported("distilbert")
    getattr(ONNXRegistry.from_torchlib, "cache_clear", lambda: None)()  # torch warns where it makes one
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    capfd.readouterr()
    again = export_float(Checkpoint(folder), tiny.preprocessor("distilbert"), tmp_path / "folder" / "other.onnx")
    captured = capfd.readouterr()
    assert (captured.out, captured.err, logger.level) == ("", "", level)
    assert again.read_bytes() == path.read_bytes()


def test_large_weights_go_beside(tmp_path, monkeypatch):
    _, path = tiny.exported("bert")
    monkeypatch.setattr(export.graph.onnx, "EXTERNAL_ABOVE", 0)
    for _ in range(2):  # the second time over the files of the first
        out = export.graph.onnx.save(onnx.load(path), tmp_path / "model.onnx")
        sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert set(sizes) == {"model.onnx", "model.onnx.data"}
    assert sizes["model.onnx.data"] < path.stat().st_size
    features = tiny.features("bert", 2, 9)
    np.testing.assert_array_equal(run(out, features), run(path, features))


@pytest.mark.slow
def test_minilm_on_the_dev_rows(tmp_path):
    data = Path(os.environ["COMPRESS_TEST_DATA"])
    folder = data / "models" / "minilm-sst2"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("input_ids", "attention_mask", "token_type_ids")
    prepared = Preprocessor("text", names, ("0", "1"), "text-classification", 128, (32, 64, 128), tokenizer=tokenizer)
    rows = [line.split("\t")[0] for line in (data / "data/sst2/dev.tsv").read_text(encoding="utf-8-sig").splitlines()[1:]]
    assert len(rows) == 872
    path = export_float(Checkpoint(folder), prepared, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(path))
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="sdpa").eval()
    for _, features in prepared.batches(rows, 32):
        with torch.no_grad():
            expected = model(**{name: torch.from_numpy(value) for name, value in features.items()}).logits.numpy()
        logits = session.run(["logits"], features)[0]
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        np.testing.assert_array_equal(logits.argmax(1), expected.argmax(1))
