"""What a decoder reads for each token, against counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from export.generation.genai_folder import MODEL
from export.generation.reads import reads_per_token
from foundation.models.checkpoint import load_float
from tests.export.generation.genai_checkpoints import checkpoint, genai_folder
from tests.export.generation.test_codes import ZERO_POINTS

pytestmark = pytest.mark.whole


def weights(kind: str) -> tuple[int, int]:
    """Returns the number of weights of the blocks' linear layers, and of the head."""
    model: Any = load_float(checkpoint(kind))
    head = model.get_output_embeddings()
    linears = [module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    return sum(linears), head.weight.numel()


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("scheme", "floating", "bits", "float_bits"),
    [
        (None, "fp32", 32, 32),
        (None, "bf16", 16, 16),
        ("w8a8-dynamic", "fp32", 8, 32),
        ("w4a16", "fp32", 4, 32),
        (ZERO_POINTS, "fp32", 4, 32),
    ],
)
def test_weights_are_counted_in_the_type_that_they_are_kept_in(
    kind: str, scheme: str | None, floating: str, bits: int, float_bits: int
) -> None:
    blocks, head = weights(kind)
    counted = reads_per_token(genai_folder(kind, scheme) / MODEL, floating, "fp32")["weight_bytes"]
    expected = (blocks * bits + head * float_bits) / 8
    assert expected < counted < 1.25 * expected  # the rest: norms, biases, scales, positions


@pytest.mark.parametrize(("cache", "size"), [("fp32", 4), ("bf16", 2), ("fp16", 2), ("int8", 1)])
def test_keys_and_values_of_all_layers_are_counted(cache: str, size: int) -> None:
    found = reads_per_token(genai_folder("llama") / MODEL, "fp32", cache)["cache_bytes_per_token"]
    assert found == 2 * 2 * 2 * 16 * size  # layers, keys and values, heads, sizes of a head
