"""The search: writes the served model with each setting into a folder of its own, starts the server on it, and loads it.

    points -> successive halving over measured load -> the best point, next to the settings of the recipe on new measurements in turns
           -> the best point if it is faster by the whole interval, else the settings of the recipe

A tried repository has no limits of its queue: a refused request would not count as an answer. The limit of the p99 is the recipe's, or the
p99 of its own settings where they are saturated: then more rows are answered at no later time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from foundation.artifacts import triton as documents
from foundation.core.errors import InputError
from foundation.stage.context import Context
from foundation.standalone.preprocess import Row
from triton_repo.load.connection import Address
from triton_repo.load.figures import Figures
from triton_repo.load.load import examine, load_test
from triton_repo.load.settings import Load
from triton_repo.tuning.confirmation import Confirmation, confirm
from triton_repo.tuning.halving import KEPT, Trial, halve, rounds
from triton_repo.tuning.load import Loaded, loaded, saturation
from triton_repo.tuning.settings import Tune
from triton_repo.tuning.space import Point, points

NOISE = 1.05
"""How much the p99 of the same settings differs from one measurement to the next."""
Measure = Callable[[Point, float, float | None], Loaded]
"""Measures a point for so many seconds at each load, with a limit of the p99 or none."""


@dataclass(frozen=True)
class Tuned:
    """Result of the search."""

    best: Point
    own: Point
    """The settings of the recipe."""
    limit_ms: float
    trials: Sequence[Trial[Point, Loaded]]
    """All points; `best` comes first."""
    confirmation: Confirmation[Point] | None
    """The winner of the search next to the settings of the recipe; None where these won it."""

    def as_document(self, model: str) -> documents.Tuned:
        """Returns the entry of a model in triton.json."""
        found = self.confirmation
        return documents.Tuned(
            model=model,
            best=documents.Settings(**asdict(self.best)),
            limit_p99_ms=self.limit_ms,
            confirmation=None if found is None else found.as_document().with_(proposed=documents.Settings(**asdict(found.proposed))),
            trials=tuple(
                documents.Trial(
                    **asdict(trial.point),
                    own=trial.point == self.own,
                    rows_per_s=trial.measured.rate,
                    p99_ms=None if trial.measured.best is None else trial.measured.best.p99_ms,
                    concurrency=None if trial.measured.best is None else trial.measured.best.concurrency,
                    rounds=trial.round + 1,
                    loads=tuple(asdict(level) for level in trial.measured.levels),
                )
                for trial in self.trials
            ),
        )


def tune_served(tune: Tune, own: Point, model: str, context: Context, write: Callable[[Point, Path], None]) -> Tuned:
    """Searches the settings that a model is served with, on the real server and the evaluation rows.

    Args:
        tune: What the recipe asks for.
        own: The settings of the recipe itself.
        model: Name of the model.
        context: The context of the stage.
        write: Writes a repository with a point's settings into a folder.

    Raises:
        InputError: See `search`.
    """
    found = points(tune, own, context.target.num_threads)
    measure = measured(write, model, context.data.evaluation.rows, tune, context.scratch)
    with context.progress.bar(f"tune {model}", sum(rounds(len(found))) + (tune.p99_ms is None) + 2 * tune.repeats) as advance:

        def counted(point: Point, seconds: float, limit_ms: float | None) -> Loaded:
            loads = measure(point, seconds, limit_ms)
            advance(1)
            return loads

        tuned = search(tune, found, counted)
    context.progress.log(f"  {model}: {len(found)} settings tried within a p99 of {tuned.limit_ms:.1f} ms; {in_words(tuned)}")
    return tuned


def in_words(tuned: Tuned) -> str:
    """Returns the decision, with its interval."""
    found = tuned.confirmation
    if found is None:
        return "none answered more rows than the recipe's settings, which stay"
    value, low, high = ("without bound" if end is None else f"{end:.2f}" for end in found.ratio)
    about = f"{value} times the rows/s of the recipe's settings, 95 % interval {low} to {high} of {len(found.rates)} repeats"
    return f"{describe(found.proposed)}: {about}" + ("" if found.taken else "; that may be noise, so the recipe's settings stay")


def describe(point: Point) -> str:
    """Returns the settings in words."""
    return (
        f"{point.instances} process{'es' * (point.instances > 1)} of {point.threads} thread{'s' * (point.threads > 1)}, batches of up to "
        f"{point.max_batch_size}, {point.max_queue_delay_us} us of waiting"
    )


def search(tune: Tune, points: Sequence[Point], measure: Measure) -> Tuned:
    """Searches.

    Args:
        tune: What the recipe asks for.
        points: The points, the settings of the recipe first.
        measure: Measures one.

    Raises:
        InputError: No setting stays within the limit, or the settings of the recipe answer nothing without an error.
    """
    limit_ms = tune.p99_ms
    if limit_ms is None:
        saturated = saturation(measure(points[0], tune.seconds, None).levels)
        if saturated is None or saturated.p99_ms is None:
            raise InputError("triton_repo.tune", "the settings of the recipe give errors under every load that it asks for")
        limit_ms = NOISE * saturated.p99_ms
    trials = halve(points, lambda point, seconds: measure(point, seconds, limit_ms), tune.seconds)
    if trials[0].measured.best is None:
        fastest = min((level.p99_ms for trial in trials for level in trial.measured.levels if level.p99_ms is not None), default=None)
        reached = "no request was answered" if fastest is None else f"the smallest p99 was {fastest:.1f} ms"
        raise InputError("triton_repo.tune.p99_ms", f"{limit_ms:g} given", f"no setting stays within it ({reached})", "give more")
    own, proposed, confirmation = points[0], trials[0].point, None
    if proposed != own:
        confirmation = confirm(own, proposed, lambda point: measure(point, KEPT * tune.seconds, limit_ms), tune.repeats)
    best = proposed if confirmation is not None and confirmation.taken else own
    return Tuned(best, own, limit_ms, sorted(trials, key=lambda trial: trial.point != best), confirmation)


def measured(write: Callable[[Point, Path], None], model: str, rows: Sequence[Row], tune: Tune, scratch: Path) -> Measure:
    """Returns a function that measures a point with a real server.

    Args:
        write: Writes a repository with a point's settings into a folder.
        model: Name of the model.
        rows: The rows to send.
        tune: Loads and rows of a request.
        scratch: Where repositories and logs go.
    """
    from triton_repo import environment
    from triton_repo.server import TritonServer

    def measure(point: Point, seconds: float, limit_ms: float | None) -> Loaded:
        with tempfile.TemporaryDirectory(dir=scratch, prefix="tuned-") as folder:
            repository = Path(folder, "models")
            write(point, repository)
            with TritonServer(repository, environment.check(), Path(folder, "log"), models=[model]) as server:
                address = Address("grpc", server.grpc_address)
                served = examine(address, model)

                def ask(concurrency: int) -> Figures:
                    (figures,) = load_test(address, served, rows, [Load(concurrency=concurrency, rows=tune.rows, seconds=seconds)])
                    return figures

                return loaded(ask, sorted(tune.concurrency), limit_ms)

    return measure
