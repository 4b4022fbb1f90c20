"""The engines of the tiny sentiment classifier, built once for all tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compress.models.preprocessor import preprocessor
from compress.standalone.preprocess import Preprocessor
from export.engines import onnxruntime, openvino
from export.graph.qdq import insert_qdq
from tests.export import sentiment


@pytest.fixture(scope="session")
def prepared() -> Preprocessor:
    return preprocessor(sentiment.checkpoint(), "text-classification", sentiment.LENGTH, sentiment.TARGET)


@pytest.fixture(scope="session")
def float_build(prepared: Preprocessor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(sentiment.checkpoint(), prepared, tmp_path_factory.mktemp("float"), quantized=False)


@pytest.fixture(scope="session")
def int8_build(prepared: Preprocessor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(sentiment.quantized(), prepared, tmp_path_factory.mktemp("int8"), quantized=True)


def _build(checkpoint: Path, prepared: Preprocessor, folder: Path, *, quantized: bool) -> Path:
    """Fills a folder with model.onnx, model_uint8.onnx, openvino.xml, openvino.bin, preprocess.json, tokenizer.json."""
    prepared.save(folder)
    model, floating = folder / "model.onnx", sentiment.graph(checkpoint)
    if quantized:
        insert_qdq(floating, checkpoint, model)
    else:
        shutil.copy(floating, model)
    openvino.convert(model, folder)
    if quantized:
        onnxruntime.with_uint8_activations(model, folder)
    return folder
