"""BERT-large in int8 with plain and with dependent launches, in turns, as CUDA graphs on one GPU; and every kernel with both.

    plain, dependent    the same pass (`export.fused.launches`), rows of one length, packed
    equal               whether all bits of the answers are equal, of `compared_launches.BATCHES` batches, before and after the times

The times are those of the GPU's events; an empty cache before each, so that weights come from memory (`timing`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import SMALL, Make, Maker
from benchmarks.gpu.measurements import BROKEN, line
from benchmarks.gpu.squad import Bert, Machine, random_plan
from benchmarks.gpu.timing import Gpu, in_turns
from export.fused.compared_launches import passes
from export.fused.launches import refusal
from foundation.core.errors import InputError

SHAPES = ((1, 128), (8, 128), (32, 384))
"""(rows, tokens)."""
TINY = Bert(64, 128, 2, 2, 40, 16)
TINY_SHAPES = ((1, 8), (2, 5))
"""Of a rehearsal."""


def on_gpu(machine: Machine, gpu: Gpu) -> dict[str, Any]:
    """Returns `kernels` and `rows`, as `kernels_alike` and `times` return them, of every kernel and of BERT-large.

    Raises:
        InputError: This GPU has no dependent launches.
    """
    why = refusal(machine.device)
    if why is not None:
        raise InputError("--only launches", f"dependent launches do not run here: {why}")
    return {"kernels": kernels_alike("cuda"), "rows": times(Bert(), SHAPES, machine, gpu)}


def rehearsed(machine: Machine, gpu: Gpu) -> dict[str, Any]:
    """Returns the same of a tiny model on a CPU, where both kinds are plain launches."""
    return {"kernels": [], "rows": times(TINY, TINY_SHAPES, machine, gpu)}


def times(bert: Bert, shapes: Sequence[tuple[int, int]], machine: Machine, gpu: Gpu) -> list[dict[str, Any]]:
    """Times both kinds of launches at every shape.

    Args:
        bert: Sizes of the model.
        shapes: Rows and tokens of a row.
        machine: Where.
        gpu: Takes the times.

    Returns:
        Of each `shape`: `plain_ms` and `dependent_ms` (medians), `speedup`, and `differs`: which answers differ, None where none does.
    """
    found = []
    with torch.inference_mode():
        for one in passes(random_plan(bert, machine.device), machine.device, machine.dtype, shapes, machine.tiles, machine.record):
            before = one.differs()
            ms = {kind: statistics.median(samples) for kind, samples in in_turns(one.works(), gpu).items()}
            row = {f"{kind}_ms": round(time, 5) for kind, time in ms.items()} | {"speedup": round(ms["plain"] / ms["dependent"], 4)}
            found.append({"shape": one.shape, **row, "differs": before or one.differs()})
    return found


def kernels_alike(device: str, cases: Mapping[str, Make] = SMALL) -> list[dict[str, Any]]:
    """Launches every kernel plainly and then three times dependent on itself.

    Args:
        device: cuda; of a CPU only in a process that interprets kernels, where all launches are plain.
        cases: What is launched.

    Returns:
        `kernel`; `passed`, whether the outputs have the same bits; and `reason`, what was wrong, None where nothing was.
    """
    found = []
    for name, make in cases.items():
        try:
            plain, dependent = (_outputs(make, device, kind) for kind in (False, True))
            equal = all(torch.equal(one, other) for one, other in zip(plain, dependent, strict=True))
            reason = None if equal else "the outputs have other bits"
        except BROKEN as error:
            reason = line(error)
        found.append({"kernel": name, "passed": reason is None, "reason": reason})
    return found


def table(found: Mapping[str, Any]) -> str:
    """Returns the figures as lines."""
    wrong = [f"{row['kernel']}: {row['reason']}" for row in found["kernels"] if not row["passed"]]
    rows = [
        f"{row['shape']:>9} tokens: plain {row['plain_ms']:.3f} ms, dependent {row['dependent_ms']:.3f} ms, "
        f"{row['speedup']:.3f} times as fast, {'all bits equal' if row['differs'] is None else row['differs'] + ' DIFFER'}"
        for row in found["rows"]
    ]
    return "\n".join([f"{len(found['kernels'])} kernels launched both ways, {len(wrong)} differ", *wrong, *rows])


def _outputs(make: Make, device: str, dependent: bool) -> list[Tensor]:
    case = make(Maker(device))
    for _ in range(3 if dependent else 1):
        replace(case.launch, dependent=dependent and device == "cuda").run()
    return [output.cpu() for output in case.outputs]
