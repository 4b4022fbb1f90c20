"""Block-sparse int8 GEMM and its storage: packing loses nothing, products equal the dense kernel's to the bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.gpu import references
from benchmarks.gpu.references import unpack
from export.kernels.block_sparse import Packed, SparseWeight, index, pack
from export.kernels.epilogue import Int8Weight, Output
from foundation.core.errors import InputError
from prune.sparsify.patterns import Blocks, mask
from tests.export.kernels.calls import block_sparse_gemm, int8_gemm

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]
LENGTHS = st.sampled_from([1, 31, 32, 33, 63, 64, 65, 128, 129, 300])
SPARSITY = st.sampled_from([0.0, 0.3, 0.8, 0.99, 1.0])


def pruned(outputs: int, inputs: int, side: int, sparsity: float) -> Tensor:
    """Returns random codes with the zeros that the stage `sparsify` makes."""
    codes = torch.randint(-128, 128, (outputs, inputs)).to(torch.int8)
    return codes * mask(torch.rand(outputs, inputs), Blocks(side, side), sparsity) if sparsity < 1 else torch.zeros_like(codes)


def weight_of(packed: Packed, bias: bool = True) -> SparseWeight:
    outputs = packed.shape[0]
    return SparseWeight(packed, index(packed), torch.rand(outputs) * 1e-3 + 1e-5, torch.randn(outputs) if bias else None)


@given(LENGTHS, LENGTHS, st.sampled_from([32, 64]), SPARSITY, st.integers(0, 999))
@settings(max_examples=20)
def test_packing_loses_nothing(outputs: int, inputs: int, side: int, sparsity: float, seed: int) -> None:
    torch.manual_seed(seed)
    codes = pruned(outputs, inputs, side, sparsity)
    packed = pack(codes, side)
    assert torch.equal(unpack(packed), codes)
    again = pack(unpack(packed), side)
    assert torch.equal(again.codes, packed.codes)
    assert torch.equal(again.bitmap, packed.bitmap)
    strips, columns, blocks = -(-outputs // side), -(-inputs // side), 0
    for s in range(strips):
        for t in range(columns):
            bit = int(packed.bitmap[(s * columns + t) // 8]) >> (s * columns + t) % 8 & 1
            block = codes[s * side : (s + 1) * side, t * side : (t + 1) * side]
            assert bit == int(block.any())
            if bit:
                assert torch.equal(packed.codes[blocks, : block.shape[0], : block.shape[1]], block)
            blocks += bit
    assert packed.size_bytes == blocks * side**2 + -(-strips * columns // 8)


def test_sizes_of_a_pruned_layer() -> None:
    codes = pruned(768, 3072, 64, 0.75)
    assert pack(codes, 64).size_bytes == codes.numel() // 4 + 576 // 8
    assert pack(codes, 32).size_bytes == codes.numel() // 4 + 2304 // 8


@given(st.sampled_from([1, 16, 17, 65, 130]), LENGTHS, LENGTHS, st.sampled_from([32, 64]), SPARSITY, st.booleans(), st.integers(0, 999))
@settings(max_examples=10)
@example(130, 129, 300, 64, 0.3, True, 0)
@example(1, 1, 1, 32, 1.0, False, 0)
def test_every_bit_is_that_of_the_dense_kernel_and_of_torch(
    interpreted: Interpreted, rows: int, outputs: int, inputs: int, side: int, sparsity: float, dynamic: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, packed = torch.randint(-128, 128, (rows, inputs)).to(torch.int8), pack(pruned(outputs, inputs, side, sparsity), side)
    weight, scale = weight_of(packed), torch.rand(rows, 1) * 0.1 + 1e-4 if dynamic else 0.03
    output = Output(dtype=torch.float32)
    found = interpreted(block_sparse_gemm, x, scale, weight, output)
    torch.testing.assert_close(found, references.block_sparse_gemm(x, scale, weight, output), rtol=0, atol=0)
    dense = Int8Weight(unpack(packed), weight.scale, weight.bias)
    assert torch.equal(found, interpreted(int8_gemm, x, scale, dense, output))


@pytest.mark.parametrize("output", [Output("gelu", scale=0.02), Output("silu"), Output(scale=1e-4)], ids=str)
def test_epilogues(interpreted: Interpreted, output: Output) -> None:
    x, packed = torch.randint(-128, 128, (70, 96)).to(torch.int8), pack(pruned(65, 96, 32, 0.5), 32)
    weight = weight_of(packed)
    dense = Int8Weight(unpack(packed), weight.scale, weight.bias)
    found = interpreted(block_sparse_gemm, x, 0.03, weight, output)
    assert torch.equal(found, interpreted(int8_gemm, x, 0.03, dense, output))
    if output.scale == 1e-4:
        assert found.min() == -128
        assert found.max() == 127


def test_wrong_input_is_refused() -> None:
    packed = pack(pruned(70, 40, 32, 0.0), 32)
    weight = weight_of(packed)
    with pytest.raises(InputError, match="with a side of 32 or 64"):
        pack(torch.zeros(4, 4, dtype=torch.int8), 16)
    with pytest.raises(InputError, match=r"codes: .* given; a contiguous tensor of int8, of shape \[6, 32, 32\]"):
        Packed(packed.shape, packed.bitmap, packed.codes[1:])
    with pytest.raises(InputError, match="bitmap: "):
        Packed((70, 400), packed.bitmap, packed.codes)
    with pytest.raises(InputError, match=r"scale: .* given; a positive number"):
        replace(weight, scale=torch.zeros(70))
