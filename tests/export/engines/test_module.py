"""The functions of an engine's file, and the defaults of those that it does not have."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from export.engines.module import EngineModule
from export.engines.registry import engine_module
from foundation.core.engines import ENGINES
from foundation.schemes.table import SCHEMES

DYNAMIC = SCHEMES["w8a8-dynamic"]


def file_of(**functions: Any) -> Any:
    required = {"refusal": None, "absence": None, "build": None, "open_engine": None}
    return SimpleNamespace(**{**required, **functions})


def test_an_engine_without_a_function_gets_the_default(tmp_path: Path) -> None:
    module = EngineModule.of(file_of())
    assert not any(fact() for fact in (module.proves_ahead, module.computes_bf16, module.strongly_typed, module.all_tokens))
    assert {module.float_part(setting) for setting in ("auto", "fp32", "bf16", "fp16")} == {"fp32"}
    assert module.own_graph("int8", tmp_path / "model.onnx", tmp_path) == tmp_path / "model.onnx"
    rounding = module.rounding(DYNAMIC)
    assert rounding is not None
    assert not rounding.exact
    assert module.rounding(SCHEMES["w8a8"]) is None


def test_a_function_of_the_file_takes_the_place_of_the_default() -> None:
    assert EngineModule.of(file_of(all_tokens=lambda: True)).all_tokens()


def test_an_engine_has_to_build() -> None:
    file = file_of()
    del file.build
    with pytest.raises(TypeError, match="build"):
        EngineModule.of(file)


def test_what_single_engines_do_differently() -> None:
    modules = {name: engine_module(name) for name in ENGINES}
    assert [name for name in modules if modules[name].strongly_typed()] == ["tensorrt"]
    assert [name for name in modules if modules[name].proves_ahead()] == ["tensorrt"]
    assert [name for name in modules if modules[name].all_tokens()] == ["tensorrt"]
    assert [name for name in modules if not modules[name].reads_graph()] == ["openvino_genai", "onnxruntime_decoder", "openvino_seq2seq"]
    assert [name for name in modules if modules[name].float_part("fp16") == "fp16"] == [
        "tensorrt",
        "torch_kernels",
        "torch_kernels_decoder",
    ]
    exact = [name for name in modules if (rounding := modules[name].rounding(SCHEMES["w4a8-block"])) is not None and rounding.exact]
    assert exact == ["onnxruntime_decoder"]
    assert not any(modules[name].rounding(SCHEMES["w4a16"]) for name in modules)
    assert [name for name in modules if modules[name].rounding(DYNAMIC) is None] == ["onnxruntime", "torch_kernels_decoder"]


def test_only_engines_that_round_in_blocks_take_w4a8_block(tmp_path: Path) -> None:
    taken = [name for name in ENGINES if engine_module(name).refusal("w4a8-block", tmp_path / "none.onnx") is None]
    assert taken == ["torch", "onnxruntime_decoder"]
