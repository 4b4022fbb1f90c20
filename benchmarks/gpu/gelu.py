"""The methods of `export.kernels.activation_codes` beside each other, on a GPU: how fast a GEMM is that ends in each, and its errors.

    times     the products that grow BERT-base and BERT-large, one scale for the input as in the encoder, every method in its fastest tile
    errors    a GEMM of zeros with a bias hands any y to the epilogue, so that all bfloat16 in [-10, 10] and a dense grid go through the
              kernel itself; its codes against those of float64

`off` counts codes that are not the correctly rounded ones, `steps` is the largest difference (1 where a tie was near), `tie` how far from a
tie the farthest of them lay, in steps, and `bound` what the method allows there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from triton.errors import TritonError

from benchmarks.gpu.cases import Maker
from benchmarks.gpu.references import distance_bound
from benchmarks.gpu.timing import Gpu, in_turns, median_ms
from export.kernels import gemm
from export.kernels.activation_codes import Activation, Method
from export.kernels.epilogue import Int8Weight, Output
from export.kernels.gemm import Tile
from export.kernels.launch import Launch

SHAPES = ((4096, 3072, 768), (4096, 4096, 1024))
"""Rows, outputs and inputs."""
SCALES = (0.1, 0.02, 0.001)
"""Of the output; with the last, codes below -128 are clamped."""
LARGEST, GRID = 10.0, 2**22
TILES = (
    Tile(64, 64, 128, 4, 3),
    Tile(64, 128, 128, 4, 3),
    Tile(64, 128, 128, 4, 3, True),
    Tile(128, 64, 128, 4, 3),
    Tile(128, 128, 64, 8, 4, True),
    Tile(128, 128, 128, 8, 3),
    Tile(128, 128, 128, 8, 3, True),
    Tile(64, 64, 128, 4, 3, persistent=True),
    Tile(128, 128, 128, 8, 3, persistent=True),
    Tile(64, 256, 128, 8, 3),
    Tile(128, 256, 128, 8, 3),
    Tile(128, 256, 128, 8, 3, True),
    Tile(256, 128, 128, 8, 3),
)


def gelu_figures(device: str, gpu: Gpu) -> dict[str, Any]:
    """Returns `times` and `errors`, a row each for a shape and a method, and for a function, a method and a scale."""
    methods = get_args(Method)
    return {
        "times": [row for shape in SHAPES for row in times(Maker(device), shape, methods, gpu)],
        "errors": [
            {"activation": activation, "method": method, "scale": scale, **errors(activation, method, scale, probes(device))}
            for activation in ("gelu", "silu")
            for method in methods
            for scale in SCALES
        ],
    }


def times(
    make: Maker, shape: tuple[int, int, int], methods: Sequence[Method], gpu: Gpu, tiles: Sequence[Tile] = TILES
) -> list[dict[str, Any]]:
    """Times every method, and the GEMM to float16 without GELU, in its fastest tile; the fastest once more, in turns.

    Args:
        make: Makes the tensors.
        shape: Rows, outputs, inputs.
        methods: What is timed.
        gpu: Takes the times.
        tiles: What is tried.

    Returns:
        `shape`, `method`, `ms` (median), `tera_per_s`, `tile`, and the milliseconds of every `tiles`; None where a tile does not run.
    """
    rows, outputs, inputs = shape
    x, weight = make.codes(rows, inputs), make.weight(outputs, inputs)
    endings: dict[str, Output] = {
        "no activation, float16": Output(),
        **{method: Output("gelu", scale=0.1, method=method) for method in methods},
    }
    best: dict[str, tuple[Tile, Launch]] = {}
    every: dict[str, dict[Tile, float | None]] = {}
    for name, output in endings.items():
        out = make.empty(rows, outputs, dtype=output.stored)
        launches = {tile: gemm.launch(x, 0.02, weight, output, out, tile) for tile in tiles}
        every[name] = {tile: time_of(launch.run, gpu) for tile, launch in launches.items()}
        ran = {tile: ms for tile, ms in every[name].items() if ms is not None}
        if ran:
            tile = min(ran, key=lambda one: ran[one])
            best[name] = tile, launches[tile]
    again = {name: sorted(ms)[len(ms) // 2] for name, ms in in_turns({name: launch.run for name, (_, launch) in best.items()}, gpu).items()}
    return [
        {
            "shape": " x ".join(map(str, shape)),
            "method": name,
            "ms": round(again[name], 5),
            "tera_per_s": round(launch.cost.operations / again[name] / 1e9, 1),
            "tile": told(tile),
            "tiles": {told(one): ms for one, ms in every[name].items()},
        }
        for name, (tile, launch) in best.items()
    ]


def time_of(work: Any, gpu: Gpu) -> float | None:
    """Returns the median time of a work in milliseconds; None where this GPU has no room for it."""
    try:
        return round(median_ms(work, gpu), 5)
    except TritonError:
        return None


def told(tile: Tile) -> str:
    """Returns a tile in words."""
    ending = (", in halves" if tile.two_passes else "") + (", persistent" if tile.persistent else "")
    return f"{tile.rows} x {tile.outputs} x {tile.inputs}, {tile.num_warps} warps, {tile.num_stages} stages{ending}"


def probes(device: str, grid: int = GRID, largest: float = LARGEST) -> Tensor:
    """Returns every bfloat16 in [-largest, largest] and so many numbers in between, float32 `[O]`."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(torch.bfloat16).float()
    return torch.cat([halves[halves.abs() <= largest], torch.linspace(-largest, largest, grid, device=device)])


def errors(activation: Activation, method: Method, scale: float, y_O: Tensor, tile: Tile | None = None) -> dict[str, Any]:
    """Holds the codes of a method against those of float64.

    Args:
        activation: gelu or silu.
        method: How codes are found.
        scale: Of the output.
        y_O: What goes through the kernel, float32 `[O]`.
        tile: Of the GEMM.

    Returns:
        `count` of the numbers, `off`, `steps`, `tie`, `bound` and `within`, whether every code that differs lay within the bound of a tie.
    """
    zeros, ones = torch.zeros(len(y_O), 16, dtype=torch.int8, device=y_O.device), torch.ones_like(y_O)
    codes_NO = torch.empty(1, len(y_O), dtype=torch.int8, device=y_O.device)
    gemm.launch(zeros[:1], 1.0, Int8Weight(zeros, ones, y_O), Output(activation, scale=scale, method=method), codes_NO, tile).run()
    found, y = codes_NO[0].double(), y_O.double()
    share = torch.erfc(-y * 0.5**0.5) / 2 if activation == "gelu" else torch.sigmoid(y)
    step = float(torch.tensor(scale, dtype=torch.float32))
    exact = y * share / step
    off = found != exact.round().clamp(-128, 127)
    tie = (exact - exact.floor() - 0.5).abs()
    bound = distance_bound(y, y * share, step, activation, method)
    return {
        "count": len(y),
        "off": int(off.sum()),
        "steps": float((found - exact.round().clamp(-128, 127)).abs().max()),
        "tie": float(tie[off].max()) if off.any() else 0.0,
        "bound": float(bound[off].max()) if off.any() else 0.0,
        "within": bool((tie[off] <= bound[off]).all()),
    }
