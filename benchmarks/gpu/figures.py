"""Checks and times the kernels and the fused encoder on the first GPU of this machine; `make gpu-check` runs it in a process of its own.

    python -m benchmarks.gpu.figures FILE            everything, on a GPU
    python -m benchmarks.gpu.figures FILE --check    the answers of the kernels alone; with TRITON_INTERPRET=1 without a GPU
    python -m benchmarks.gpu.figures FILE --only gelu    the ways to end a GEMM in GELU and int8, beside each other; about a minute
    python -m benchmarks.gpu.figures FILE --only rivals    BERT-large against torch eager, compiled, on packed rows, and torchao
    python -m benchmarks.gpu.figures FILE --only decoders    GPT-2 in int8, reading texts and adding a token to each, against torch
    python -m benchmarks.gpu.figures FILE --only launches    BERT-large with plain and with dependent launches, and every kernel with both
    python -m benchmarks.gpu.figures FILE --only rivals --rehearse    any of these three of a tiny model on a CPU, with TRITON_INTERPRET=1

FILE (JSON) holds `checked`. Where times are taken, it also holds `device`, `versions`, `peak`, `kernels`, `sparse` (from `measurements`),
`packed` (from `squad`) and `shapes` (from `against_torch`). What failed has a `reason`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks.gpu import decoder_rivals, launch_kinds, rivals
from benchmarks.gpu.against_torch import compare_with_torch
from benchmarks.gpu.cases import EVERY
from benchmarks.gpu.gelu import gelu_figures
from benchmarks.gpu.measurements import BROKEN, checked, int8_peak, line, pairs_of_layers, shares, sparse
from benchmarks.gpu.peaks import Gpu as Peaks
from benchmarks.gpu.peaks import named
from benchmarks.gpu.squad import LENGTHS, QUERIES, Bert, Machine, packed_rate, random_plan, squad_lengths
from benchmarks.gpu.timing import OnGpu, OnHost
from export.fused.graphs import Recording, record_on_gpu
from export.fused.tuning import tuner
from foundation.artifacts.artifact import write_json
from foundation.core.errors import InputError
from foundation.core.named import one_of

REHEARSED = ("rivals", "decoders", "launches")
"""What a CPU can rehearse."""


def figures() -> dict[str, Any]:
    """Returns everything that is measured on the current GPU."""
    name, gpu = torch.cuda.get_device_name(), OnGpu()
    peaks = named(name)
    measured_peak = int8_peak("cuda", gpu)
    return {
        "device": name,
        "versions": {"triton": triton.__version__, "cuda": str(torch.version.cuda)},
        "checked": checked("cuda"),
        "peak": peak(peaks, measured_peak),
        "kernels": shares(EVERY, "cuda", gpu, peaks, measured_peak),
        "sparse": sparse("cuda", gpu, peaks, pairs_of_layers()),
        **whole(gpu),
    }


def gelu_alone() -> dict[str, Any]:
    """Returns what `gelu_figures` measures on the current GPU, and prints it."""
    found = {"device": torch.cuda.get_device_name(), "triton": triton.__version__, **gelu_figures("cuda", OnGpu())}
    for row in found["times"]:
        print(f"{row['shape']:20} {row['method']:24} {1000 * row['ms']:7.1f} us {row['tera_per_s']:7.1f} tera-operations/s   {row['tile']}")
    for row in found["errors"]:
        deviation = f"{row['off']} of {row['count']} off, by {row['steps']:.0f}, {row['tie']:.2g} from a tie ({row['bound']:.2g} allowed)"
        print(f"{row['activation']:5} {row['method']:11} {row['scale']:6} {deviation}{'' if row['within'] else '  BEYOND ITS BOUND'}")
    return found


class Once:
    """Stands for a recording in a rehearsal: the pass runs once, in the interpreter."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self._output = work()

    def replay(self) -> Tensor:
        """Returns what the pass returned."""
        return self._output


def against(which: str, rehearsed: bool) -> dict[str, Any]:
    """Returns what `rivals` or `decoder_rivals` measures, and prints its table."""
    encoders = which == "rivals"
    if rehearsed:
        record: Callable[[Callable[[], Tensor]], Recording] = Once
        machine = Machine(torch.device("cpu"), record, lambda: None, dtype=torch.float32)
        measure = rivals.rehearsed if encoders else decoder_rivals.rehearsed
        found = {"device": "cpu, a rehearsal", **measure(machine, OnHost())}
    else:
        device = torch.device("cuda")
        machine = Machine(device, record_on_gpu, torch.cuda.synchronize, tuner(device))
        measured = rivals.on_gpu(machine, OnGpu(), squad_lengths(QUERIES)) if encoders else decoder_rivals.on_gpu(machine, OnGpu())
        found = {"device": torch.cuda.get_device_name(), **measured}
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    verdicts = rivals.verdicts(found) if encoders else rivals.verdicts(found, decoder_rivals.MODEL, decoder_rivals.ATLEAST)
    print(rivals.table(found, verdicts))
    return {**found, "versions": versions, "verdicts": [{**asdict(line), "verdict": line.word} for line in verdicts]}


def launches(rehearsed: bool) -> dict[str, Any]:
    """Returns what `launch_kinds` measures, and prints it."""
    if rehearsed:
        machine = Machine(torch.device("cpu"), Once, lambda: None, dtype=torch.float32)
        found = {"device": "cpu, a rehearsal", **launch_kinds.rehearsed(machine, OnHost())}
    else:
        device = torch.device("cuda")
        machine = Machine(device, record_on_gpu, torch.cuda.synchronize, tuner(device))
        found = {"device": torch.cuda.get_device_name(), **launch_kinds.on_gpu(machine, OnGpu())}
    print(launch_kinds.table(found))
    return {**found, "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}}


def peak(peaks: Peaks | None, measured_peak: float) -> dict[str, Any]:
    """Returns the int8 peak in tera-operations per second: `published` (None where the GPU is not in the table), `measured`, `source`."""
    source = f"data sheet of {peaks.name}" if peaks is not None else "torch._int_mm, 8192 x 8192 x 8192, on this GPU"
    return {"published": None if peaks is None else peaks.int8, "measured": round(measured_peak / 1e12, 1), "source": source}


def whole(gpu: OnGpu) -> dict[str, Any]:
    """Returns what is measured of BERT-large: `packed`, and `shapes`, with the `reason` of either where it failed."""
    device = torch.device("cuda")
    machine, bert = Machine(device, record_on_gpu, torch.cuda.synchronize, tuner(device)), Bert()
    found: dict[str, Any] = {"packed": {"sequences_per_s": None}, "shapes": {"rows": []}}
    works: dict[str, Callable[[], dict[str, Any]]] = {
        "packed": lambda: {**packed_rate(random_plan(bert, device), squad_lengths(QUERIES), machine), "lengths": LENGTHS.name},
        "shapes": lambda: {"rows": compare_with_torch(random_plan(bert, device), bert, machine, gpu)},
    }
    for name, work in works.items():
        try:
            found[name] = {**work(), "reason": None}
        except BROKEN as error:
            found[name]["reason"] = line(error)
    return found


def _measured(options: argparse.Namespace, device: str) -> dict[str, Any]:
    if options.check:
        return {"checked": checked(device)}
    if options.only == "launches":
        return launches(options.rehearse)
    if options.only in REHEARSED:
        return against(options.only, options.rehearse)
    return gelu_alone() if options.only == "gelu" else figures()


def main(arguments: Sequence[str]) -> int:
    """Writes the file; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.figures", description="Checks and times the kernels on a GPU.")
    parser.add_argument("file", type=Path, help="JSON that is written")
    parser.add_argument("--check", action="store_true", help="check the answers alone")
    parser.add_argument("--only", choices=["gelu", *REHEARSED], help="measure this alone")
    parser.add_argument("--rehearse", action="store_true", help=f"with --only {one_of(REHEARSED)}: a tiny model on the CPU")
    options = parser.parse_args(arguments)
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    if options.rehearse and options.only not in REHEARSED:
        print(f"figures: --rehearse given without --only {one_of(REHEARSED)}; nothing else is rehearsed", file=sys.stderr)
        return 2
    if not torch.cuda.is_available() and not ((options.check or options.rehearse) and interprets):
        print(
            "figures: torch finds no NVIDIA GPU that it can use; with --check or --rehearse, and TRITON_INTERPRET=1, none is needed",
            file=sys.stderr,
        )
        return 2
    if options.only is not None and options.check:
        print("figures: --check takes no times, and --only none but those of its name; give one of the two", file=sys.stderr)
        return 2
    try:
        write_json(options.file, _measured(options, "cpu" if interprets else "cuda"))
    except InputError as error:
        print(f"figures: {'; '.join(error.lines)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
