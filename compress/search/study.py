"""The study of a search in Optuna: what was drawn, what was measured, what was dropped and why.

It is stored in `study.journal` of the search folder, a log that several processes append to (Optuna's journal storage). The lock on the log
is an flock, which ends with its process: Optuna's own lock file would outlive a kill. The next writer removes a line that a kill cut off.
Everything known about a candidate is an attribute of its trial. No state lies outside the journal, so any process that opens the study can
resume it.

Candidates are drawn in waves by a sampler that knows constraints and several objectives. It is seeded with the seed of the recipe and the
number of trials so far: the same study draws the same candidate, whether or not it was interrupted before. A draw that repeats an earlier
one is reported as failed and drawn again. In a small space the untried combinations are then taken in random order.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pydantic import JsonValue

from compress.recipe import Recipe
from compress.search.candidate import Candidate, Dropped
from compress.search.space import MOST_COUNTED, Knob, Values, num_combinations, own_values, untried
from foundation.artifacts.store import waited_for
from foundation.core.errors import InputError
from foundation.core.shown import reason

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

JOURNAL, LOCK = "study.journal", ".study.lock"
WAVE, VALUES, OWN, PASSED, DROPPED, RECORD, REPEATS = "wave", "values", "own", "passed", "dropped", "record:", "repeats"
WHOLE_WAVES, BASELINE = "whole_waves", "baseline_seconds"
MOST_REPEATS = 20
"""Draws in a row that repeat earlier ones before the space counts as tried."""
HIGHER = ("throughput",)


class FileLock:
    """The lock on the journal: an flock, with the repair of a line that a killed process left unfinished."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._held: BinaryIO | None = None

    def acquire(self) -> bool:
        """Waits for the lock."""
        self._held = self._journal.open("rb+")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        _cut_unfinished(self._held)
        return True

    def release(self) -> None:
        """Gives the lock back."""
        assert self._held is not None, "it is held"
        self._held.close()
        self._held = None


def _cut_unfinished(journal: BinaryIO) -> None:
    """Removes what follows the last line break of a log."""
    size = journal.seek(0, os.SEEK_END)
    if not size:
        return
    journal.seek(size - 1)
    if journal.read(1) == b"\n":
        return
    journal.seek(0)
    journal.truncate(journal.read().rfind(b"\n") + 1)


class Study:
    """The study of one search folder.

    Args:
        folder: The search folder, which exists; None: a study in memory, which `compress plan` draws from.
        recipe: The recipe of the search.
        knobs: Its knobs.
        higher_is_better: Direction of the primary metric.
    """

    def __init__(self, folder: Path | None, recipe: Recipe, knobs: Sequence[Knob], higher_is_better: bool) -> None:
        import optuna
        from optuna.study import StudyDirection

        assert recipe.search is not None, "a recipe without a search has no study"
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._folder, self._recipe, self._knobs, self._search = folder, recipe, tuple(knobs), recipe.search
        self.signs = [-1.0 if name in HIGHER or (name == "metric" and higher_is_better) else 1.0 for name in self._search.objectives]
        """-1 for an objective that is better the higher it is."""
        self._storage: optuna.storages.BaseStorage = optuna.storages.InMemoryStorage() if folder is None else _storage(folder / JOURNAL)
        directions = [StudyDirection.MINIMIZE if sign > 0 else StudyDirection.MAXIMIZE for sign in self.signs]
        with self.locked(), _blaming_damage(folder):
            self._study = optuna.create_study(storage=self._storage, study_name="search", directions=directions, load_if_exists=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lets one process at a time draw and decide."""
        if self._folder is None:
            yield
            return
        with waited_for(self._folder / LOCK):
            yield

    def candidates(self) -> list[Candidate]:
        """Returns every candidate, by number."""
        return [_candidate(trial) for trial in self._trials() if VALUES in trial.user_attrs and REPEATS not in trial.user_attrs]

    def draw_wave(self) -> list[Candidate]:
        """Draws the next wave, or the rest of an interrupted one; returns its candidates, none if the space is exhausted.

        The recipe itself is the first candidate, if it is in the space. Called with the study locked.
        """
        known, wave = self.candidates(), self._whole_waves()
        self._clear()
        if not known and (own := own_values(self._recipe, self._knobs)) is not None:
            self._study.enqueue_trial(self._drawn(own), user_attrs={OWN: True})
        while len(self.candidates()) < self._search.budget.trials:
            mine = [one for one in self.candidates() if one.wave == wave]
            if len(mine) >= self._search.halving.wave or not self._draw(wave):
                break
        drawn = [one for one in self.candidates() if one.wave == wave]
        if drawn:
            self._study.set_user_attr(WHOLE_WAVES, wave + 1)
        return drawn

    def is_drawn(self, wave: int) -> bool:
        """Whether all candidates of a wave were drawn: a kill may have come between two of them."""
        return wave < self._whole_waves()

    def _whole_waves(self) -> int:
        return int(self._study.user_attrs.get(WHOLE_WAVES, 0))

    @property
    def baseline_seconds(self) -> float:
        """The time that the baseline took when it was run."""
        return float(self._study.user_attrs.get(BASELINE, 0.0))

    def note_baseline(self, seconds: float) -> None:
        """Stores the time that the baseline took; of several calls the longest time counts."""
        self._study.set_user_attr(BASELINE, max(seconds, self.baseline_seconds))

    def record(self, number: int, rung: str, figures: Mapping[str, object]) -> None:
        """Keeps what was measured of a candidate on a rung."""
        self._trial(number).set_user_attr(f"{RECORD}{rung}", dict(figures))

    def passes(self, candidate: Candidate, rung: str) -> None:
        """Records that a candidate has passed a rung."""
        if rung not in candidate.passed:
            self._trial(candidate.number).set_user_attr(PASSED, [*candidate.passed, rung])

    def drop(self, number: int, rung: str, reason: str, excess: Mapping[str, float] | None = None) -> None:
        """Drops a candidate.

        Args:
            number: The candidate.
            rung: Where.
            reason: Why, in one line.
            excess: By how much it exceeds goals, where that is the reason: the sampler learns from it.
        """
        import optuna

        trial = self._trial(number)
        trial.set_user_attr(DROPPED, {"rung": rung, "reason": reason})
        _constrain(trial, excess or {})
        self._study.tell(number, state=optuna.trial.TrialState.PRUNED)

    def set_aside(self, number: int, rung: str, reason: str) -> None:
        """Drops a candidate that does not fit into the remaining hours, until `take_up`. Optuna is not informed: that would be final."""
        self._trial(number).set_user_attr(DROPPED, {"rung": rung, "reason": reason, "for_time": True})

    def take_up(self) -> None:
        """Reopens the candidates that were set aside. Called with the study locked."""
        for one in self.candidates():
            if one.dropped is not None and one.dropped.for_time:
                self._trial(one.number).set_user_attr(DROPPED, None)

    def finish(self, number: int, results: Sequence[float], excess: Mapping[str, float]) -> None:
        """Reports to Optuna the objectives of a candidate that passed every rung, and by how much it exceeds each goal."""
        trial = self._trial(number)
        _constrain(trial, excess)
        self._study.tell(number, list(results))

    def losses(self, results: Sequence[float]) -> tuple[float, ...]:
        """Returns objectives as losses: smaller is better."""
        return tuple(sign * value for sign, value in zip(self.signs, results, strict=True))

    def importances(self) -> dict[str, dict[str, float] | None]:
        """Returns for each objective the share of its variance over the finished candidates that each knob explains (fANOVA, Hutter et al.
        2014); None where fewer than four candidates have finished or all of them agree."""
        import optuna

        study = self._in_current_space()
        done = study.get_trials(deepcopy=False)
        found: dict[str, dict[str, float] | None] = {}
        for index, name in enumerate(self._search.objectives):
            values = [trial.values[index] for trial in done]
            varied = [knob.path for knob in self._knobs if len({json.dumps(trial.params[knob.path]) for trial in done}) > 1]
            if len(done) < FEWEST or len(set(values)) < 2 or not varied:
                found[name] = None
                continue
            evaluator = optuna.importance.FanovaImportanceEvaluator(seed=self._recipe.seed)
            shares = optuna.importance.get_param_importances(study, evaluator=evaluator, params=varied, target=_objective(index))
            found[name] = {knob.path: float(shares.get(knob.path, 0.0)) for knob in self._knobs}
        return found

    def _in_current_space(self) -> optuna.Study:
        """Returns a study in memory of the finished candidates.

        Optuna compares no trials whose ranges differ, and an older version may have ended a range one step early.
        """
        import optuna

        study = optuna.create_study(directions=self._study.directions)
        distributions = {knob.path: knob.distribution for knob in self._knobs}
        for trial in self._study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)):
            params = self._drawn(self._exact(trial.user_attrs[VALUES]))
            study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, values=trial.values))
        return study

    def _draw(self, wave: int) -> bool:
        """Draws one candidate of a wave; returns whether there was one."""
        import optuna

        distributions = {knob.path: knob.distribution for knob in self._knobs}
        for _ in range(MOST_REPEATS):
            trials = self._trials()
            self._study.sampler = self._sampler(self._recipe.seed + len(trials))
            trial = self._study.ask(distributions)
            values = {knob.path: knob.value(trial.params[knob.path]) for knob in self._knobs}
            trial.set_user_attr(WAVE, wave)
            known = {self._text(other.user_attrs[VALUES]): other.number for other in trials if VALUES in other.user_attrs}
            if self._text(values) not in known:
                trial.set_user_attr(VALUES, values)
                return True
            trial.set_user_attr(REPEATS, known[self._text(values)])
            self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            if not self._take_untried(len(trials)):
                return False
        return False

    def _take_untried(self, seed: int) -> bool:
        """Queues an untried combination for the next draw. Returns False if none is left; True also if there are too many to count."""
        count = num_combinations(self._knobs)
        if count is None or count > MOST_COUNTED:
            return True
        left = list(untried(self._knobs, [self._exact(one.values) for one in self.candidates()]))
        if left:
            self._study.enqueue_trial(self._drawn(random.Random(seed).choice(left)))
        return bool(left)

    def _clear(self) -> None:
        """Reports interrupted draws to Optuna as failed, and candidates whose drop was interrupted as pruned."""
        from optuna.trial import TrialState

        for trial in self._trials():
            dropped = trial.user_attrs.get(DROPPED)
            unfinished = trial.state == TrialState.RUNNING and (VALUES not in trial.user_attrs or dropped)
            if unfinished and not (dropped and dropped.get("for_time")):
                self._study.tell(trial.number, state=TrialState.PRUNED if dropped else TrialState.FAIL)

    def _exact(self, values: Mapping[str, JsonValue]) -> Values:
        """Returns values with the numbers of the grids: a study of an older version holds sums of binary steps."""
        return {knob.path: knob.exact(values[knob.path]) for knob in self._knobs}

    def _text(self, values: Mapping[str, JsonValue]) -> str:
        return json.dumps(self._exact(values), sort_keys=True)

    def _drawn(self, values: Values) -> dict[str, float | str | None]:
        return {knob.path: knob.drawn(values[knob.path]) for knob in self._knobs}

    def _sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        from optuna.samplers import NSGAIISampler, TPESampler

        wave = self._search.halving.wave
        if self._search.sampler == "nsga2":
            return NSGAIISampler(seed=seed, population_size=wave)
        return TPESampler(seed=seed, n_startup_trials=wave)

    def _trial(self, number: int) -> optuna.Trial:
        import optuna

        study_id = self._storage.get_study_id_from_name("search")
        return optuna.Trial(self._study, self._storage.get_trial_id_from_study_id_trial_number(study_id, number))

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)


FEWEST = 4
"""Fewest finished candidates for an estimate of the importance of knobs."""


def _constrain(trial: optuna.Trial, excess: Mapping[str, float]) -> None:
    """Sets the constraints of a trial that an interrupted run has not set yet."""
    for name, value in excess.items():
        if name not in trial.constraints:
            trial.set_constraint(name, value)


def _objective(index: int) -> Callable[[FrozenTrial], float]:
    return lambda trial: trial.values[index]


def _storage(journal: Path) -> optuna.storages.BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    journal.touch()
    lock = FileLock(journal)
    lock.acquire()  # also removes what a kill cut off, which the reader would refuse
    lock.release()
    with _blaming_damage(journal.parent):
        return JournalStorage(JournalFileBackend(str(journal), lock_obj=lock))  # type: ignore[arg-type]


@contextmanager
def _blaming_damage(folder: Path | None) -> Iterator[None]:
    """Turns Optuna's errors about an unreadable log into an `InputError`.

    Raises:
        InputError: The log of the study in this folder is damaged.
    """
    try:
        yield
    except (ValueError, KeyError) as error:
        if folder is None:
            raise
        remedy = "remove the folder of the search and start again"
        raise InputError(f"{folder / JOURNAL}", f"damaged ({reason(error)})", remedy=remedy) from error


def _candidate(trial: FrozenTrial) -> Candidate:
    attributes = trial.user_attrs
    dropped = attributes.get(DROPPED)
    return Candidate(
        number=trial.number,
        wave=attributes[WAVE],
        values=attributes[VALUES],
        own=attributes.get(OWN, False),
        records={name.removeprefix(RECORD): value for name, value in attributes.items() if name.startswith(RECORD)},
        passed=tuple(attributes.get(PASSED, ())),
        dropped=Dropped(**dropped) if dropped else None,
        results=None if trial.values is None else tuple(trial.values),
    )
