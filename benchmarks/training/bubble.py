"""How long the processes of a pipeline wait, measured with stages that sleep, against the formula.

    python benchmarks/training/bubble.py [--processes 2 4] [--microbatches 4 8] [--forward-ms 40]

    waiting / work = (p - 1) / (m v)     p processes, m micro-batches, v stages in each (Narayanan et al. 2021,
                                         https://arxiv.org/abs/2104.04473, section 2.2)

Every stage sleeps for its share of a forward pass, and twice as long in the backward pass, so that the cores of this machine do not matter.
The v stages of a process sleep as long as one. The schedules are those that `parallel: {pipeline: p}` runs. Work is what a process sleeps;
the time of a step is of the slowest process, and the median of some steps. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from foundation.machine.parallel import joined
from tests.ranks import in_ranks

STEPS = 4
"""The first one sets up connections, and is not counted."""


class Sleeps(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Returns its input after some seconds."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient after twice as many seconds."""
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Stage(nn.Module):
    """A stage that sleeps."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(1)), seconds

    def forward(self, x: Tensor) -> Tensor:
        """Returns its input, times a weight."""
        made: Tensor = Sleeps.apply(x * self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return made


def steps(folder: Path, parts: int, each: int, forward_s: float) -> None:
    """Takes some steps, and writes the seconds of each."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    with joined() as team:
        device, states = torch.device("cpu"), torch.ones(1, 1, requires_grad=True)
        numbers = range(team.rank, team.size * each, team.size)
        made = [
            PipelineStage(Stage(forward_s / each), number, team.size * each, device, states, states, group=torch.distributed.group.WORLD)
            for number in numbers
        ]
        loss: Any = lambda output, target: (output - target).square().mean()  # noqa: E731
        schedule: Any = Schedule1F1B(made[0], parts, loss) if each == 1 else ScheduleInterleaved1F1B(made, parts, loss)
        seconds = []
        for _ in range(STEPS):
            torch.distributed.barrier()
            began = time.monotonic()
            schedule.step(*([torch.ones(parts, 1)] if team.rank == 0 else []), target=torch.zeros(parts, 1), return_outputs=False)
            seconds.append(time.monotonic() - began)
        (folder / f"{team.rank}.json").write_text(json.dumps(seconds[1:]))


def main() -> None:
    """Prints a row for every schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--forward-ms", type=float, default=40.0)
    given = parser.parse_args()
    print("| processes | micro-batches | schedule | step, s | work, s | waiting / work | formula |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for count in given.processes:
        for parts in (number for number in given.microbatches if number % count == 0):
            for each, name in ((1, "1f1b"), (2, "interleaved")):
                with tempfile.TemporaryDirectory() as folder:
                    in_ranks(count, steps, Path(folder), parts, each, given.forward_ms / 1e3)
                    found = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
                work = 3 * given.forward_ms / 1e3 * parts
                step = statistics.median(map(max, zip(*found, strict=True)))
                formula = (count - 1) / (parts * each)
                print(f"| {count} | {parts} | {name} | {step:.3f} | {work:.3f} | {step / work - 1:.3f} | {formula:.3f} |", flush=True)


if __name__ == "__main__":
    main()
