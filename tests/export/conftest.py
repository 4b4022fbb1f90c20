"""The engines of the tiny sentiment classifier, built once for all tests."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from export.engines import onnxruntime, openvino
from export.graph.qdq import insert_qdq
from foundation.artifacts.graph import Graph
from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor
from tests.export import sentiment

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = Path(__file__).with_name("kernels") / "interpreter.py"


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Calls a function in a process of its own that interprets kernels; returns what it returns and raises what it raises."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(INTERPRETER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            pickle.dump((function, arguments, named), process.stdin)
            process.stdin.flush()
            worked, answer = pickle.load(process.stdout)
            if not worked:
                raise answer
            return answer

        yield call
        process.stdin.close()


@pytest.fixture(scope="session")
def prepared() -> Preprocessor:
    return Checkpoint(sentiment.checkpoint()).preprocessor("text-classification", sentiment.LENGTH, sentiment.TARGET)


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
        insert_qdq(Graph(floating), Checkpoint(checkpoint), model)
    else:
        shutil.copy(floating, model)
    openvino.convert(model, folder)
    if quantized:
        onnxruntime.with_uint8_activations(model, folder)
    return folder
