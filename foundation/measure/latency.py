"""Comparable latencies of several engines on one machine.

Each engine runs in its own process. For each shape the processes take turns, A B C A B C A B C, one at a time, so that a slow phase of the
machine affects all of them. A turn starts with discarded warm-up calls. Compare latencies only within one call of `measure`: ratios are
formed within a turn (`foundation.measure.turns`).

    throughput = batch * n / sum(samples)          percentiles: linear interpolation; p99 is None below 200 samples

A machine that does something else too is watched. Where the system allows it, the engine whose turn it is comes before other work
(`foundation.machine.priority`). Disturbed samples (`foundation.measure.samples`) are taken again, until a block has as
many undisturbed ones as it needs, or twice as many in all. A block in which time was stolen or throttled, or the machine was slow
(`foundation.machine.load`), is taken again as a whole, `REPEATED` of all blocks at most. While the interval of a median is wider than
`WIDE`, a shape gets more turns, up to `MAX_TURNS`. Calls of a fraction of a millisecond get up to `SHORT_TURNS`, until the interval is
narrower than `NARROW`. A turn of such calls is shorter than a slow phase of the machine, so single turns differ by up to half. A figure
whose noise stays is marked `busy`.

An engine that answers prompts reads rows as prompts, in the pipeline that is served, and chooses one token; torch computes the logits of
the last token alone. Engines of blocks compute those of all tokens.

Without a race each engine and shape gets at least 30 samples, then more up to 200 samples or 3 s. With one (`foundation.measure.race`) the
first turn is short, and engines that cannot win any more leave after it.

Not measured: concurrent streams. The load test of the Triton stage measures latency under load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import ceil

import numpy as np

from foundation.artifacts.timed import Timing
from foundation.core.progress import Progress
from foundation.machine.environment import hardware
from foundation.machine.load import Watch
from foundation.measure import samples
from foundation.measure.engine_process import EngineProcess
from foundation.measure.race import BLOCKS, Block, Race
from foundation.measure.samples import Figures, Turn
from foundation.stage.context import Job

TURNS, MAX_TURNS = 3, 6
MIN_SAMPLES, MAX_SAMPLES = 30, 200
MAX_SECONDS = 3.0
WIDE = 0.1
"""Half-width of the 95 % interval of a median, relative, above which a shape gets another turn."""
SHORT_TURNS, SHORT_SECONDS, NARROW = 30, 1.5, 0.03
"""Most turns, and half-width of the interval, for an engine whose samples at a shape took less than `SHORT_SECONDS` in all."""
SHORT_BLOCK = Block(3, 40, 0.1)
"""The block of such turns beyond `MAX_TURNS`: turns differ by more than the calls within one."""
REPEATED = 0.25
Shape = tuple[int, int | None]


def measure(
    jobs: Sequence[Job], shapes: Sequence[Shape], progress: Progress, race: Race | None = None, watch: Watch | None = None
) -> list[tuple[int, Timing]]:
    """Measures every engine at every shape; all processes stay alive throughout.

    Args:
        jobs: The engines.
        shapes: (batch, sequence) each; the sequence is None for images.
        progress: Shows a bar.
        race: Which engines compete; None measures all of them alike.
        watch: Watches the machine; its summary covers this call.

    Returns:
        For each engine and shape the index of the job and its row; engines in the order of `jobs`.

    Raises:
        EngineError: An engine failed.
    """
    with ExitStack() as stack:
        processes = _opened(jobs, stack)
        table = Table(jobs, processes, shapes, watch or Watch())
        live: Sequence[int] = range(len(jobs))
        with progress.bar("latency", len(shapes) * len(jobs) * TURNS) as table.advance:
            if race is not None:
                live = _run(race, table)
            else:
                for shape in shapes:
                    for turn in range(TURNS):
                        table.turn(shape, turn, live, None)
        with progress.bar("latency: noisy shapes", len(shapes) * (SHORT_TURNS - TURNS)) as table.advance:
            for shape in shapes:
                table.more_turns(shape, live)
    return [
        (index, table.cells[index, shape].row(job, shape, table.elsewhere(index))) for index, job in enumerate(jobs) for shape in shapes
    ]


def _opened(jobs: Sequence[Job], stack: ExitStack) -> list[EngineProcess]:
    """Opens the engines, as many at a time as there are cores: most of it is one thread that imports libraries and compiles a graph."""
    processes, together = list[EngineProcess](), int(hardware()["cores"])
    for number, job in enumerate(jobs):
        if number >= together:
            processes[number - together].await_open()
        processes.append(stack.enter_context(EngineProcess(job, wait=False)))
    for process in processes[-together:]:
        process.await_open()
    return processes


def _run(race: Race, table: Table) -> Sequence[int]:
    """Lets the engines of a race take their turns; returns those that can still win."""
    live: Sequence[int] = range(len(table.jobs))
    for turn, block in enumerate(BLOCKS):
        for shape in table.shapes:
            table.turn(shape, turn, live, block.at(race.needs_p99(shape)))
        live = race.staying(live, {index: table.figures(index) for index in live})
        table.advance((len(table.jobs) - len(live)) * len(table.shapes) if turn < len(BLOCKS) - 1 else 0)
    return live


class Table:
    """All engines at all shapes.

    Args:
        jobs: The engines.
        processes: Their processes.
        shapes: The shapes.
        watch: Watches the machine.
    """

    def __init__(self, jobs: Sequence[Job], processes: Sequence[EngineProcess], shapes: Sequence[Shape], watch: Watch) -> None:
        self.jobs, self.shapes = jobs, shapes
        self.advance: Callable[[int], None] = lambda steps: None
        """Moves the bar that is shown."""
        self._processes, self._watch = processes, watch
        self.cells = {(index, shape): Cell() for index in range(len(jobs)) for shape in shapes}

    def turn(self, shape: Shape, turn: int, live: Sequence[int], block: Block | None) -> None:
        """Lets engines take one turn at a shape; a block that stolen time or a slow machine spoiled is taken again."""
        for index in live:
            cell = self.cells[index, shape]
            wanted = block or cell.share(max(1, TURNS - turn))
            found = cell.ask(self._processes[index], shape, wanted)
            if self._watch.disturbed() and self._watch.repeated < REPEATED * len(self.cells):
                self._watch.repeated += 1
                found = cell.ask(self._processes[index], shape, wanted)
                self._watch.disturbed()
            self._watch.came_first = cell.came_first
            cell.add(turn, found)
            self.advance(1 if turn < TURNS else 0)

    def more_turns(self, shape: Shape, live: Sequence[int]) -> None:
        """Lets engines take further turns at a shape while their intervals are wide, with those that they are compared with: the fastest,
        and up to `MAX_TURNS` the first one, which is the reference."""
        for turn in range(TURNS, SHORT_TURNS):
            cells = {index: self.cells[index, shape].figures(self.jobs[index], self.elsewhere(index)) for index in live}
            wide = {index for index, cell in cells.items() if self._is_wide(index, shape, turn, cell)}
            if not wide:
                self.advance(SHORT_TURNS - turn)
                return
            fastest = min(cells, key=lambda index: cells[index].p50)
            reference = {live[0]} if turn < MAX_TURNS else set()  # its calls are the longest
            self.turn(shape, turn, sorted(wide | reference | {fastest}), BLOCKS[-1] if turn < MAX_TURNS else SHORT_BLOCK)
            self.advance(1)

    def _is_wide(self, index: int, shape: Shape, turn: int, cell: Figures) -> bool:
        """Whether an engine takes a further turn; estimated figures do not improve with more turns."""
        if cell.busy and cell.estimated:
            return False
        return (cell.half > WIDE and turn < MAX_TURNS) or (cell.half > NARROW and self.cells[index, shape].seconds < SHORT_SECONDS)

    def elsewhere(self, index: int) -> float | None:
        """Returns the `parallelism` of an engine at all shapes."""
        return samples.parallelism([turn for shape in self.shapes for turn in self.cells[index, shape].turns])

    def figures(self, index: int) -> dict[Shape, Figures]:
        """Returns the summaries of an engine's cells so far."""
        known = self.elsewhere(index)
        return {shape: self.cells[index, shape].figures(self.jobs[index], known) for shape in self.shapes}


class Cell:
    """The samples of one engine at one shape."""

    def __init__(self) -> None:
        self.turns: list[Turn | None] = []
        self.peak_memory_bytes = 0
        self.placement: dict[str, str] = {}
        self.came_first = False

    @property
    def seconds(self) -> float:
        """Time that all samples took, seconds."""
        return sum(float(turn.wall.sum()) for turn in self.turns if turn is not None) / 1e3

    def share(self, turns_left: int) -> Block:
        """Returns this turn's share of the missing samples."""
        count = sum(len(turn.wall) for turn in self.turns if turn is not None)
        least, most = (max(1, ceil((limit - count) / turns_left)) for limit in (MIN_SAMPLES, MAX_SAMPLES))
        return Block(least, most, max(0.0, MAX_SECONDS - self.seconds) / turns_left)

    def ask(self, process: EngineProcess, shape: Shape, block: Block) -> Turn:
        """Lets the engine take a block of samples."""
        batch, sequence = shape
        answer = process.ask("measure", batch=batch, sequence=sequence, least=block.least, most=block.most, seconds=block.seconds)
        self.peak_memory_bytes, self.placement = answer["peak_memory_bytes"], answer["placement"]
        self.came_first = answer["came_first"]
        return Turn.of(answer)

    def add(self, number: int, turn: Turn) -> None:
        """Adds the samples of a turn."""
        self.turns += [None] * (number - len(self.turns)) + [turn]

    def figures(self, job: Job, elsewhere: float | None = None) -> Figures:
        """Returns the summary of the samples."""
        return samples.figures(self.turns, job.threads, elsewhere, on_cpu=job.labels["device"] == "cpu")

    def row(self, job: Job, shape: Shape, elsewhere: float | None = None) -> Timing:
        """Returns the row of the report."""
        found = self.figures(job, elsewhere)
        times = found.samples
        p50, p90, p99 = (round(float(value), 4) for value in np.percentile(times, (50, 90, 99)))
        return Timing(
            **{name: job.labels[name] for name in ("engine", "mode", "precision")},
            **self.placement,
            threads=job.threads,
            batch=shape[0],
            sequence=shape[1],
            p50_ms=p50,
            p90_ms=p90,
            p99_ms=p99 if len(times) >= MAX_SAMPLES else None,
            throughput_per_s=round(1e3 * shape[0] * len(times) / float(times.sum()), 2),
            n=len(times),
            quantiles_ms=[round(float(value), 4) for value in np.percentile(times, range(0, 101, 5))],
            peak_memory_bytes=self.peak_memory_bytes,
            turns_ms=[None if one is None else round(one, 4) for one in found.medians],
            interval_ms=[round(end, 4) for end in found.interval],
            between_turns=None if found.between is None else round(found.between, 4),
            within_turns=round(found.within, 4),
            disturbed=None if found.disturbed is None else round(found.disturbed, 4),
            estimated=found.estimated,
            busy=found.busy,
        )
