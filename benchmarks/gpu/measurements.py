"""What the kernels answer and how fast they are on the GPU of this machine.

    checked    every kernel on small shapes, against its reference in torch on the CPU
    peak       of the data sheet, where the GPU is in `benchmarks.gpu.peaks`; and that of a dense product by torch._int_mm, measured here
    shares     operations / time / peak of each launch, and its floor / time: how near it is to what memory and units allow
    sparse     the dense int8 GEMM beside the block-sparse one with 80 % of the blocks zero, in turns

A dense int8 GEMM is timed in its fastest tile, which the engine takes too (`tuning`). Times begin with an empty cache (`timed`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from benchmarks.gpu.cases import SMALL, Case, Make, Maker, fifth_case, gemm_case
from benchmarks.gpu.peaks import Gpu as Peaks
from benchmarks.gpu.timing import Gpu, in_turns, median_ms
from export.fused.tuning import candidates
from export.kernels.block_sparse import SIDES
from export.kernels.epilogue import Output
from export.kernels.launch import Launch

BROKEN = (TritonError, RuntimeError)
"""What a kernel raises that a GPU does not compile, has no room for, or fails in."""
SIDE = 8192
"""Of the product by which the peak is measured."""
SHAPES = ((4096, 1024), (1024, 4096), (4096, 4096))
"""Outputs and inputs of the layers that are held against dense ones, for 4096 rows."""


def checked(device: str, cases: Mapping[str, Make] = SMALL) -> list[dict[str, Any]]:
    """Runs every kernel on small shapes.

    Args:
        device: cuda, or cpu in a process that interprets kernels.
        cases: What is run.

    Returns:
        `kernel`; `passed`; and `reason`, what was wrong, None where nothing was.
    """
    return [{"kernel": name, "passed": (why := wrong(make, device)) is None, "reason": why} for name, make in cases.items()]


def wrong(make: Make, device: str) -> str | None:
    """Returns what is wrong with the answers of a kernel; None where nothing is."""
    case = make(Maker(device))
    try:
        case.launch.run()
        found = [output.cpu() for output in case.outputs]
    except BROKEN as error:
        return line(error)
    expected = make(Maker("cpu")).reference()
    reasons = (differs(one, other, case) for one, other in zip(found, expected, strict=True))
    return next((reason for reason in reasons if reason is not None), None)


def differs(found: Tensor, expected: Tensor, case: Case) -> str | None:
    """Returns how an output differs from the expected one by more than the bound of its case allows; None where it does not."""
    bound, (one, other) = case.bound, (found.double(), expected.double())
    allowed = torch.full_like(one, bound.steps) if found.dtype == torch.int8 else bound.relative * other.abs() + bound.absolute
    beyond = ~((one - other).abs() <= allowed)  # not a number is beyond every bound
    if not beyond.any():
        return None
    worst = (one - other).abs()[beyond].max()
    kind = str(found.dtype).removeprefix("torch.")
    return f"{int(beyond.sum())} of {beyond.numel()} {kind} outputs are beyond the bound, by up to {float(worst):.3g}"


def shares(cases: Mapping[str, Make], device: str, gpu: Gpu, peaks: Peaks | None, measured_peak: float) -> list[dict[str, Any]]:
    """Times every launch.

    Args:
        cases: What is timed.
        device: cuda.
        gpu: Takes the times.
        peaks: Of the data sheet; None where the GPU is not known.
        measured_peak: int8 operations per second of a dense product here.

    Returns:
        Of each `kernel`: `unit`, `ms` (median), `tera_per_s`; `share` of the peak of its unit by the data sheet, and where there is none
        and the unit is int8, of the measured one; `floor_share`, floor / time; `tile` of a dense GEMM; and `reason`, why it was not timed,
        or None.
    """
    found = []
    for name, make in cases.items():
        row: dict[str, Any] = {"kernel": name, "unit": None, "ms": None, "tera_per_s": None, "share": None, "floor_share": None}
        row |= {"tile": None, "reason": None}
        try:
            case = make(Maker(device))
            launch, row["tile"] = fastest(case, gpu)
            row |= share_of(launch, median_ms(launch.run, gpu), peaks, measured_peak)
        except BROKEN as error:
            row["reason"] = line(error)
        found.append(row)
    return found


def share_of(launch: Launch, ms: float, peaks: Peaks | None, measured_peak: float) -> dict[str, Any]:
    """Returns `unit`, `ms`, `tera_per_s`, `share` and `floor_share` of a launch that took so long."""
    cost, per_s = launch.cost, launch.cost.operations / (ms / 1000)
    peak = peaks.peak(cost.unit) if peaks is not None else measured_peak if cost.unit == "int8" else None
    return {
        "unit": cost.unit,
        "ms": round(ms, 5),
        "tera_per_s": round(per_s / 1e12, 3),
        "share": None if peak is None else round(per_s / peak, 4),
        "floor_share": None if peaks is None else round(peaks.floor_s(cost) / (ms / 1000), 4),
    }


def fastest(case: Case, gpu: Gpu) -> tuple[Launch, str | None]:
    """Returns the launch of a case in its fastest tile, and that tile in words; no tile where none can be chosen."""
    if case.tiled is None:
        return case.launch, None
    times = {}
    for tile in candidates(case.outputs[0].device):
        launch = case.tiled(tile)
        try:
            times[tile] = median_ms(launch.run, gpu), launch
        except TritonError:  # this GPU has no room for it
            continue
    if not times:
        raise RuntimeError("no tile runs on this GPU")
    tile = min(times, key=lambda one: times[one][0])
    ending = (", in halves" if tile.two_passes else "") + (", persistent" if tile.persistent else "")
    return times[tile][1], f"{tile.rows} x {tile.outputs} x {tile.inputs}{ending}"


def int8_peak(device: str, gpu: Gpu, side: int = SIDE) -> float:
    """Returns the int8 operations per second of a dense square product by torch._int_mm."""
    make = Maker(device)
    a, b = make.codes(side, side), make.codes(side, side).t()
    return 2 * side**3 / (median_ms(lambda: torch._int_mm(a, b), gpu) / 1000)


def sparse(device: str, gpu: Gpu, peaks: Peaks | None, cases: Mapping[tuple[int, int, int], tuple[Make, Make]]) -> list[dict[str, Any]]:
    """Times dense layers beside block-sparse ones.

    Args:
        device: cuda.
        gpu: Takes the times.
        peaks: Of the data sheet; None where the GPU is not known.
        cases: The dense and the block-sparse product by (outputs, inputs, side of a block).

    Returns:
        `outputs`, `inputs`, `side`, `dense_ms`, `sparse_ms`, `speedup`; `allowed`, floor of the dense one / floor of the sparse one, None
        where the GPU is not known; and `reason`, why it was not timed, or None.
    """
    found = []
    for (outputs, inputs, side), (dense, few) in cases.items():
        row: dict[str, Any] = {"outputs": outputs, "inputs": inputs, "side": side, "dense_ms": None, "sparse_ms": None, "speedup": None}
        row |= {"allowed": None, "reason": None}
        try:
            (whole, _), blocks = fastest(dense(Maker(device)), gpu), few(Maker(device)).launch
            times = {name: statistics.median(ms) for name, ms in in_turns({"dense": whole.run, "sparse": blocks.run}, gpu).items()}
            row |= {"dense_ms": round(times["dense"], 5), "sparse_ms": round(times["sparse"], 5)}
            row["speedup"] = round(times["dense"] / times["sparse"], 4)
            if peaks is not None:
                row["allowed"] = round(peaks.floor_s(whole.cost) / peaks.floor_s(blocks.cost), 3)
        except BROKEN as error:
            row["reason"] = line(error)
        found.append(row)
    return found


def pairs_of_layers() -> dict[tuple[int, int, int], tuple[Make, Make]]:
    """Returns the dense and the block-sparse products of `SHAPES`."""

    def dense(outputs: int, inputs: int) -> Make:
        return lambda make: gemm_case(make, 4096, outputs, inputs, Output())

    def few(outputs: int, inputs: int, side: int) -> Make:
        return lambda make: fifth_case(make, outputs, inputs, side)

    return {(*shape, side): (dense(*shape), few(*shape, side)) for shape in SHAPES for side in SIDES}


def line(error: Exception) -> str:
    """Returns an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
