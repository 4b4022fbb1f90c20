"""Prints what the machine code of every kernel uses, and how near to the limits of a GPU its work can come. Needs no GPU.

    python benchmarks/kernels.py [--capability 80 ...] [--kernel NAME ...]

Each kernel in `export/kernels` is compiled ahead of time at shapes of BERT-base (512 or 4096 rows of 768, 12 heads of 64, feed-forward of
3072) and of Llama-3-8B (batches of 16 or fewer rows, 4096 inputs), for one GPU per compute capability. Columns:

    registers, spills, shared    of a thread, of the whole code, of a program in bytes
    hot loop                     matrix instructions, loads from shared memory (LDSM), copies into it, all others
    MB, Gop                      bytes of inputs and outputs, each once; operations
    op / byte                    intensity = operations / bytes
    share                        of the peak of the unit that memory allows: min(1, intensity * bandwidth / peak)
    floor, us                    max(bytes / bandwidth, operations / peak): no kernel is faster; no time was measured

Peaks without sparsity, from the data sheets of A100 80GB SXM, A10, L4, H100 SXM and HGX B200 (an eighth of it), and for the RTX 5090
from the white paper of the RTX Blackwell architecture (fp16 products added in float32).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from export.kernels import attention, block_sparse, embedding, gemm, norm, qkv, quantize, w4a16
from export.kernels.ahead_of_time import CAPABILITIES, FP16_MATRIX, INT8_MATRIX, Binary, compiled, count
from export.kernels.epilogue import Int8Weight, Output
from export.kernels.launch import Launch


@dataclass(frozen=True)
class Gpu:
    """Published peaks."""

    name: str
    int8: float
    """Tera-operations per second."""
    fp16: float
    fp32: float
    bandwidth: float
    """Terabytes per second."""


GPUS = {
    80: Gpu("A100 SXM", 624, 312, 19.5, 2.039),
    86: Gpu("A10", 250, 125, 31.2, 0.600),
    89: Gpu("L4", 242, 121, 30.3, 0.300),
    90: Gpu("H100 SXM", 1979, 989, 67, 3.35),
    100: Gpu("B200", 4500, 2250, 75, 8.0),
    120: Gpu("RTX 5090", 838, 209.5, 104.8, 1.792),
}
HEADER = ["kernel", "sm", "registers", "spills", "shared", "hot loop", "MB", "Gop", "op / byte", "share", "floor, us"]


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", choices=CAPABILITIES, default=CAPABILITIES, help="compute capabilities")
    parser.add_argument("--kernel", nargs="+", choices=CASES, default=list(CASES), help="rows of the table")
    arguments = parser.parse_args()
    print(table(HEADER))
    print(table(["---"] * len(HEADER)))
    for name in arguments.kernel:
        launch = CASES[name]()
        for capability in arguments.capability:
            print(table(row(name, launch, compiled(launch, capability))), flush=True)


def row(name: str, launch: Launch, binary: Binary) -> list[str]:
    """Returns a row of the table."""
    gpu, cost = GPUS[binary.capability], launch.cost
    peak = {"int8": gpu.int8, "fp16": gpu.fp16, "fp32": gpu.fp32}[cost.unit] * 1e12
    intensity, bandwidth = cost.operations / cost.num_bytes, gpu.bandwidth * 1e12
    floor = max(cost.num_bytes / bandwidth, cost.operations / peak)
    return [
        name, str(binary.capability), str(binary.registers), str(binary.spills), str(binary.shared_bytes), mix(binary),
        f"{cost.num_bytes / 1e6:.2f}", f"{cost.operations / 1e9:.3f}", f"{intensity:.1f}", f"{min(1.0, intensity * bandwidth / peak):.2f}",
        f"{1e6 * floor:.1f}",
    ]  # fmt: skip


def mix(binary: Binary) -> str:
    """Returns the instructions of the hot loop in words."""
    loop = binary.hot_loop
    counts = {"int8": INT8_MATRIX, "fp16": FP16_MATRIX, "ldsm": ("LDSM",), "copy": ("LDGSTS", "UTMALDG")}
    found = {kind: count(loop, *names) for kind, names in counts.items()}
    return ", ".join(f"{number} {kind}" for kind, number in [*found.items(), ("other", loop.total() - sum(found.values()))] if number)


def table(cells: list[str]) -> str:
    """Returns a line of Markdown."""
    return f"| {' | '.join(cells)} |"


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def codes(*shape: int) -> Tensor:
    """Returns codes without memory."""
    return meta(*shape, dtype=torch.int8)


def halves(*shape: int) -> Tensor:
    """Returns float16 without memory."""
    return meta(*shape, dtype=torch.float16)


def gemm_case(rows: int, outputs: int, inputs: int, output: Output) -> Launch:
    """An int8 GEMM with bias, the input with a scale per token."""
    weight = Int8Weight(codes(outputs, inputs), meta(outputs), meta(outputs))
    return gemm.launch(codes(rows, inputs), meta(rows, 1), weight, output, meta(rows, outputs, dtype=output.stored))


def sparse_case(rows: int, outputs: int, inputs: int, side: int, blocks: int) -> Launch:
    """A block-sparse GEMM with so many blocks left."""
    strips, columns = outputs // side, inputs // side
    packed = block_sparse.Packed((outputs, inputs), meta((strips * columns + 7) // 8, dtype=torch.uint8), codes(blocks, side, side))
    index = block_sparse.Index(meta(strips + 1, dtype=torch.int32), meta(blocks, dtype=torch.int32))
    weight = block_sparse.SparseWeight(packed, index, meta(outputs), meta(outputs))
    return block_sparse.launch(codes(rows, inputs), meta(rows, 1), weight, Output(), halves(rows, outputs))


def norm_case(rows: int, inputs: int, centred: bool) -> Launch:
    """LayerNorm of a sum that keeps the norm, as in BERT, or RMSNorm that keeps the sum, as in Llama; codes with a scale per token."""
    layer = norm.Norm(meta(inputs), meta(inputs) if centred else None, 1e-12, centred)
    x, keep = halves(rows, inputs), "norm" if centred else "sum"
    return norm.launch(x, halves(rows, inputs), layer, codes(rows, inputs), meta(rows, 1), halves(rows, inputs), keep)


def embedding_case(tokens: int, inputs: int) -> Launch:
    """The three tables of BERT-base; codes with a scale per token."""
    lookups = [(meta(tokens, dtype=torch.int64), halves(rows, inputs)) for rows in (30522, 2, 512)]
    layer = norm.Norm(meta(inputs), meta(inputs), 1e-12)
    return embedding.launch((lookups[0], lookups[1], lookups[2]), layer, codes(tokens, inputs), meta(tokens, 1), halves(tokens, inputs))


def w4a16_case(rows: int, outputs: int, inputs: int, group_size: int) -> Launch:
    """A w4a16 GEMM with zero points."""
    groups = (outputs, inputs // group_size)
    packed = meta(outputs, inputs // 2, dtype=torch.uint8)
    weight = w4a16.Int4Weight(packed, inputs, group_size, meta(*groups), codes(*groups))
    return w4a16.launch(halves(rows, inputs), weight, halves(rows, outputs))


def attention_case(sequences: int, length: int, heads: int, dimension: int, dtype: torch.dtype) -> Launch:
    """Attention over sequences of one length, so that the count of operations is known."""
    shape, start = (sequences * length, heads, dimension), meta(sequences + 1, dtype=torch.int32)
    values = meta(*shape, dtype=torch.float32 if dtype == torch.float32 else torch.float16)
    qkv = meta(*shape, dtype=dtype), meta(*shape, dtype=dtype), values
    return attention.launch(qkv, start, [length] * sequences, attention.Scores(dimension**-0.5), torch.empty_like(values))


def qkv_case(rows: int, heads: qkv.Heads, inputs: int, turned: bool) -> Launch:
    """A projection with bias, the input with a scale per token."""
    weight = Int8Weight(codes(heads.outputs, inputs), meta(heads.outputs), meta(heads.outputs))
    q, k, v = (meta(rows, count, heads.dimension, dtype=dtype) for count, dtype in heads.types())
    rotary = qkv.Rotary(meta(rows, heads.dimension // 2), meta(rows, heads.dimension // 2)) if turned else None
    return qkv.launch(codes(rows, inputs), meta(rows, 1), weight, heads, rotary, (q, k, v))


CASES: dict[str, Callable[[], Launch]] = {
    "quantize per tensor, 4096 x 768": lambda: quantize.tensor_launch(halves(4096, 768), 0.1, codes(4096, 768)),
    "quantize per token, 4096 x 768": lambda: quantize.token_launch(halves(4096, 768), codes(4096, 768), meta(4096, 1)),
    "int8 GEMM + GELU + requantize, 4096 x 3072 x 768": lambda: gemm_case(4096, 3072, 768, Output("gelu", scale=0.1)),
    "int8 GEMM, 4096 x 768 x 3072": lambda: gemm_case(4096, 768, 3072, Output()),
    "int8 GEMM, 64 x 768 x 3072": lambda: gemm_case(64, 768, 3072, Output()),
    "int8 GEMM + SiLU, 16 x 14336 x 4096": lambda: gemm_case(16, 14336, 4096, Output("silu")),
    "residual + LayerNorm + quantize, 4096 x 768": lambda: norm_case(4096, 768, True),
    "embedding + LayerNorm + quantize, 4096 x 768": lambda: embedding_case(4096, 768),
    "residual + RMSNorm + quantize, 16 x 4096": lambda: norm_case(16, 4096, False),
    "block-sparse GEMM 64, a quarter left, 4096 x 768 x 3072": lambda: sparse_case(4096, 768, 3072, 64, 144),
    "block-sparse GEMM 32, a quarter left, 4096 x 768 x 3072": lambda: sparse_case(4096, 768, 3072, 32, 576),
    "block-sparse GEMM 64, a quarter left, 16 x 768 x 3072": lambda: sparse_case(16, 768, 3072, 64, 144),
    "w4a16 GEMM, groups of 128, 1 x 14336 x 4096": lambda: w4a16_case(1, 14336, 4096, 128),
    "w4a16 GEMM, groups of 32, 16 x 14336 x 4096": lambda: w4a16_case(16, 14336, 4096, 32),
    "packed attention, float16, 32 of 128 rows, 12 x 64": lambda: attention_case(32, 128, 12, 64, torch.float16),
    "packed attention, float32, 32 of 128 rows, 12 x 64": lambda: attention_case(32, 128, 12, 64, torch.float32),
    "packed attention, float32, 8 of 512 rows, 12 x 128": lambda: attention_case(8, 512, 12, 128, torch.float32),
    "packed attention, int8 QK, 32 of 128 rows, 12 x 64": lambda: attention_case(32, 128, 12, 64, torch.int8),
    "packed attention, int8 QK, 8 of 2048 rows, 32 x 128": lambda: attention_case(8, 2048, 32, 128, torch.int8),
    "int8 QKV, 4096 x 768, 12 x 64": lambda: qkv_case(4096, qkv.Heads(12, 12, 64), 768, False),
    "int8 QKV + rotary, QK in int8, 4096 x 4096, 32 + 8 x 128": lambda: qkv_case(4096, qkv.Heads(32, 8, 128, 0.1, 0.1), 4096, True),
    "int8 QKV + rotary, QK in int8, 16 x 4096, 32 + 8 x 128": lambda: qkv_case(16, qkv.Heads(32, 8, 128, 0.1, 0.1), 4096, True),
}
"""Launches by their row in the table."""

if __name__ == "__main__":
    main()
