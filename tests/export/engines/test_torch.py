from pathlib import Path

import numpy as np
import pytest
import torch

from export.engines.spec import EngineSpec
from export.engines.torch import Torch, can_compile
from foundation.models.checkpoint import load, load_float
from foundation.schemes.int8 import Int8Linear
from foundation.standalone.preprocess import Preprocessor
from tests.export import sentiment

pytestmark = pytest.mark.whole


def spec(checkpoint: Path, folder: Path, precision: str, mode: str = "eager") -> EngineSpec:
    rest = "fp32" if precision == "int8" else precision
    return EngineSpec("torch", mode, precision, rest, "cpu", 1, str(checkpoint), str(folder))


def integer_layers(model: torch.nn.Module) -> int:
    return sum(isinstance(module, Int8Linear) for module in model.modules())


def test_a_quantized_checkpoint_runs_in_int8_or_on_its_grid_weights(int8_build: Path, prepared: Preprocessor) -> None:
    checkpoint, features = sentiment.quantized(), prepared.encode(sentiment.rows(5))
    integer, floating = (Torch(spec(checkpoint, int8_build, precision)) for precision in ("int8", "fp32"))
    assert (integer_layers(integer._model), integer_layers(floating._model)) == (12, 0)
    name = "bert.encoder.layer.0.output.dense"
    scale_O = integer._model.get_submodule(name).weight_scale
    codes = floating._model.get_submodule(name).weight / scale_O[:, None]
    torch.testing.assert_close(codes, codes.round(), atol=1e-3, rtol=0)
    assert not np.array_equal(integer.predict(features), floating.predict(features))


def test_float_attention_is_sdpa(int8_build: Path) -> None:
    for checkpoint in (sentiment.checkpoint(), sentiment.quantized()):
        assert load_float(checkpoint).config._attn_implementation == "sdpa"


def test_bf16_stays_near_float32(float_build: Path, prepared: Preprocessor) -> None:
    features = prepared.encode(sentiment.rows(5))
    engines = [Torch(spec(sentiment.checkpoint(), float_build, precision)) for precision in ("fp32", "bf16")]
    assert next(engines[1]._model.parameters()).dtype == torch.bfloat16
    exact, rounded = (engine.predict(features) for engine in engines)
    assert rounded.dtype == np.float32
    assert [engine.placement()["float_precision"] for engine in engines] == ["fp32", "bf16"]
    assert engines[0].placement()["device"] == "cpu"
    np.testing.assert_allclose(rounded, exact, atol=0.1 * np.abs(exact).max())
    np.testing.assert_array_equal(
        exact, load(sentiment.checkpoint())(**{k: torch.from_numpy(v) for k, v in features.items()}).logits.detach()
    )


@pytest.mark.slow
def test_compiled_answers_the_same(float_build: Path, prepared: Preprocessor) -> None:
    assert can_compile()
    features = prepared.encode(sentiment.rows(2))
    eager, compiled = (Torch(spec(sentiment.checkpoint(), float_build, "fp32", mode)).predict(features) for mode in ("eager", "compiled"))
    np.testing.assert_allclose(compiled, eager, atol=1e-5)
