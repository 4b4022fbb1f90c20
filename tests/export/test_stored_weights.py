"""Integer weights in the files of engines, against the layers that were quantized."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from export.engines import onnxruntime, openvino
from export.generation.genai_folder import MODEL
from export.graph.quantized import write_graphs
from export.stored_weights import integer_weights
from foundation.core.target import Target
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.models.layers.experts import with_separate_experts
from foundation.schemes.checkpoint import load_quantization
from tests.export.generation.genai_checkpoints import checkpoint, genai_folder
from tests.export.generation.test_codes import ZERO_POINTS
from tests.export.generation.tiny_decoders import CONFIGS, GROUPED
from tests.seldom import seldom

pytestmark = pytest.mark.whole

SHALLOW = "llama of one layer"


@pytest.fixture(scope="module", autouse=True)
def shallow() -> Iterator[None]:
    """Adds a decoder that is traced in half the time to the kinds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIGS, SHALLOW, lambda: transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 1}))
        yield


SCHEMES = (None, "w8a8", "w8a8-dynamic", "w8a16", "w4a16", ZERO_POINTS)


def expected(kind: str, scheme: str | None) -> float:
    """Returns the share of the parameters that are codes."""
    model: Any = with_separate_experts(load_float(checkpoint(kind, scheme)))
    layers = {} if scheme is None else load_quantization(checkpoint(kind, scheme))[0]
    sizes = {name.removesuffix(".weight"): value.numel() for name, value in model.named_parameters() if value.squeeze().dim() > 1}
    return sum(sizes[name] for name in layers) / sum(sizes.values())


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        *(pytest.param("llama", scheme, marks=[pytest.mark.slow] * (scheme not in (None, "w8a8", ZERO_POINTS))) for scheme in SCHEMES),
        *(pytest.param("mixtral", scheme, marks=[pytest.mark.slow] * (scheme != "w8a8")) for scheme in SCHEMES),
    ],
)
def test_codes_in_the_graph_with_a_cache_are_counted(kind: str, scheme: str | None) -> None:
    model = genai_folder(kind, scheme) / MODEL
    assert integer_weights([model, model.with_suffix(".bin")]) == pytest.approx(expected(kind, scheme))


@pytest.mark.first(1)
@pytest.mark.parametrize("scheme", seldom(SCHEMES, (None, "w8a16", "w4a16")))
def test_codes_in_the_graphs_for_whole_blocks_are_counted(scheme: str | None, tmp_path: Path) -> None:
    target = Target(engines=("openvino", "onnxruntime"), sequence_lengths=(8,), batch_sizes=(1,), threads=1)
    given = checkpoint(SHALLOW, scheme)
    model = write_graphs(
        Checkpoint(given), Checkpoint(given).preprocessor("text-generation", 16, target), tmp_path / "model.onnx", target.engines
    )
    files = [model, *openvino.convert(model, tmp_path)[:1]]
    files += [onnxruntime.with_uint8_activations(model, tmp_path)] if scheme == "w8a8" else []
    files += [tmp_path / "model_dynamic.onnx"] if scheme == "w8a8-dynamic" else []
    for file in files:
        assert integer_weights([file]) == pytest.approx(expected(SHALLOW, scheme)), file.name


def test_files_that_are_no_graphs_have_no_share(tmp_path: Path) -> None:
    assert integer_weights([]) is None
    assert integer_weights([tmp_path / "model.plan"]) is None
