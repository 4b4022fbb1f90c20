"""The work of a search: waves of candidates climb the rungs, the cheapest first, and are compared when all of a wave have arrived.

    while there are trials and hours left:
        wave = drawn candidates
        for rung in rungs:                       size, latency, untrained, short, full: in rising order of cost
            measure every candidate of the wave that is left, the cheapest first
            drop those that the rung says to drop, with the reason
            set those aside for which the hours do not do: with more of them the next call takes them up again

All of it is in the study (`compress.search.study`), so that this loop has no state: a process that was killed left a candidate without a
record, and the next process measures it. Several processes run the same loop. A process that measures a candidate holds its lock; one that
decides holds the lock of the study; a decision depends only on the records of the wave, so any process may take it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from compress.search.baseline import Baseline
from compress.search.candidate import Candidate, Record
from compress.search.price import Price, cheapest_first
from compress.search.rungs.full import FullRun
from compress.search.rungs.latency import UntrainedLatency
from compress.search.rungs.rung import FAILED, Rung, Verdict
from compress.search.rungs.short import ShortTraining
from compress.search.rungs.size import PredictedSize
from compress.search.rungs.untrained import WithoutTraining
from compress.search.setup import TRIALS, Setup
from compress.search.space import words
from compress.search.study import Study
from export.parity.parity import ParityError
from foundation.artifacts.store import claimed
from foundation.core.errors import InputError
from foundation.measure.engine_process import EngineError

PAUSE_S = 0.5
PRICED = ("untrained", "short", "full")
"""Rungs that run stages; what the others cost is the same for all candidates."""


def rungs_of(setup: Setup, baseline: Baseline | None = None) -> dict[Rung, str | None]:
    """Returns all rungs in rising order of cost, with the reason why the search has no use for one of them."""
    rungs: tuple[Rung, ...] = (PredictedSize(), UntrainedLatency(baseline), WithoutTraining(baseline), ShortTraining(), FullRun(baseline))
    return {rung: rung.absent(setup) for rung in rungs}


class Work:
    """The loop of one process.

    Args:
        setup: The search.
        study: Its study.
        baseline: What candidates are compared with.
    """

    def __init__(self, setup: Setup, study: Study, baseline: Baseline) -> None:
        self._setup, self._study = setup, study
        self._rungs = [rung for rung, absent in rungs_of(setup, baseline).items() if absent is None]
        self._is_short_of_time = False
        """Whether this process has set a candidate aside because the hours that are left do not do for it."""

    def run(self) -> None:
        """Works until no candidate is open and none is left to draw.

        Raises:
            InputError: Every candidate of a wave failed in the same way: the recipe is at fault, or the machine.
        """
        with self._study.locked():
            self._study.take_up()
        while wave := self._wave():
            if not self._advance(wave):
                time.sleep(PAUSE_S)  # others measure what is left of the wave

    def _wave(self) -> list[Candidate]:
        """Returns the open candidates, of a new wave where there are none; empty where the search is at its end."""
        with self._study.locked():
            wave = [one for one in self._study.candidates() if one.state == "open"]
            if wave and self._study.is_drawn(wave[0].wave):
                return wave
            if not wave and (self._seconds_left() <= 0 or self._is_short_of_time):  # the next candidates would fare alike
                self._setup.progress.log("search.budget.hours is used up")
                return []
            drawn = self._study.draw_wave()
        if drawn:
            self._setup.progress.log(f"wave {drawn[0].wave + 1}: {len(drawn)} candidates")
        return drawn

    def _advance(self, wave: Sequence[Candidate]) -> bool:
        """Measures one candidate of a wave, and decides what can be decided; returns False where others work on all that is left."""
        number = wave[0].wave
        for rung in self._rungs:
            self._decide(rung, number)
            due = [one for one in self._open(number) if rung.NAME not in one.records]
            if due:
                return self._measure_one(rung, due)
        return True

    def _open(self, wave: int) -> list[Candidate]:
        return [one for one in self._study.candidates() if one.wave == wave and one.state == "open"]

    def _measure_one(self, rung: Rung, due: Sequence[Candidate]) -> bool:
        """Measures the cheapest candidate that no other process is at."""
        prices = {one.number: self._price(rung, one) for one in due}
        for number in cheapest_first(prices):
            with claimed(self._setup.folder / TRIALS / f".{number:04d}.lock") as mine:
                one = next(one for one in self._study.candidates() if one.number == number)
                if not mine or one.state != "open" or rung.NAME in one.records:
                    continue
                left, price = self._seconds_left(), prices[number].whole_seconds or 0.0
                if left <= price:
                    self._out_of_time(rung, one, left, price)
                else:
                    self._measure(rung, one)
                return True
        return False

    def _measure(self, rung: Rung, one: Candidate) -> None:
        self._setup.progress.log(f"{one.name} {rung.NAME}: {words(one.values)}")
        started = time.monotonic()
        try:
            figures = rung.measure(one, self._setup)
        except (InputError, ParityError, EngineError) as error:  # of this candidate: it is dropped, and the reason is kept
            figures = Record(failed=" ".join(str(error).split()))
            self._setup.progress.warn(f"{one.name} {rung.NAME}: {figures[FAILED]}")
        self._study.record(one.number, rung.NAME, {**figures, "seconds": round(time.monotonic() - started, 3)})

    def _decide(self, rung: Rung, wave: int) -> None:
        """Drops, passes or finishes the candidates of a wave, where all that are left have been measured on a rung."""
        with self._study.locked():
            open_ = self._open(wave)
            waiting = [one for one in open_ if rung.NAME not in one.records]
            undecided = [one for one in open_ if rung.NAME in one.records and rung.NAME not in one.passed]
            if not undecided or (waiting and rung.NAME != FullRun.NAME):
                return
            # those that were dropped here already count: a decision that a kill interrupted comes out the same
            here = [one for one in self._study.candidates() if one.wave == wave and rung.NAME in one.records]
            failed = {one.number: Verdict(str(one.records[rung.NAME][FAILED])) for one in here if FAILED in one.records[rung.NAME]}
            verdicts = failed | rung.verdicts([one for one in here if one.number not in failed], self._setup)
            for one in undecided:
                self._conclude(rung, one, verdicts.get(one.number))
        reasons = {verdict.reason for verdict in failed.values()}
        if not waiting and len(failed) == len(here) > 1 and len(reasons) == 1:
            raise InputError("search", f"all {len(failed)} candidates of a wave failed on the rung {rung.NAME}: {reasons.pop()}")

    def _conclude(self, rung: Rung, one: Candidate, verdict: Verdict | None) -> None:
        if verdict is not None:
            self._setup.progress.log(f"{one.name} dropped: {verdict.reason}")
            self._study.drop(one.number, rung.NAME, verdict.reason, verdict.excess)
        elif rung.NAME == FullRun.NAME:
            results = {name: value for name, value in one.records[rung.NAME]["results"].items() if value is not None}
            self._study.finish(one.number, [results[name] for name in self._setup.search.objectives], one.excess)
            told = ", ".join(f"{name} {results[name]:.4g}" for name in self._setup.search.objectives)
            self._setup.progress.log(f"{one.name} finished: {told}")
        else:
            self._study.passes(one, rung.NAME)

    def _out_of_time(self, rung: Rung, one: Candidate, left: float, price: float) -> None:
        reason = f"{max(0.0, left):.0f} s of search.budget.hours are left; this rung takes {price:.0f} s by prediction"
        with self._study.locked():
            self._study.set_aside(one.number, rung.NAME, reason)
        self._is_short_of_time = True
        self._setup.progress.log(f"{one.name} set aside: {reason}")

    def _price(self, rung: Rung, one: Candidate) -> Price:
        if rung.NAME not in PRICED:
            return Price(0.0, 0.0)
        return Price.of(self._setup.forecast(rung.recipe(one, self._setup)))

    def _seconds_left(self) -> float:
        hours = self._setup.search.budget.hours
        spent = self._study.baseline_seconds + sum(one.seconds for one in self._study.candidates())
        return float("inf") if hours is None else 3600 * hours - spent
