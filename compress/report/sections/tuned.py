"""The settings of the served model that were searched by measured load, those that are served first, and what confirmed them."""

from __future__ import annotations

from compress.report import phrases
from compress.report.model.contents import Contents
from compress.report.view import View
from foundation.artifacts.triton import Tuned


def tuned(report: Contents) -> View | None:
    """Returns the limit and a row for each setting that was tried; None where no search was asked for."""
    found = report.triton.tuned
    if found is None:
        return None
    own = next((trial.rows_per_s for trial in found.trials if trial.own), None)
    rows = [
        {
            "instances": trial.instances,
            "threads": trial.threads,
            "max_batch_size": trial.max_batch_size,
            "own": trial.own,
            "rounds": trial.rounds,
            "concurrency": trial.concurrency,
            "delay": phrases.milliseconds(trial.max_queue_delay_us / 1e3),
            "rate": phrases.rate(trial.rows_per_s),
            "gain": phrases.ratio((trial.rows_per_s or 0) / own) if own else "",
            "p99": None if trial.p99_ms is None else phrases.milliseconds(trial.p99_ms),
        }
        for trial in found.trials
    ]
    limit = phrases.milliseconds(found.limit_p99_ms)
    return {"model": found.model, "limit": limit, "rows": rows, "confirmation": _confirmation(found)}


def _confirmation(tuned: Tuned) -> View | None:
    """Returns the ratio over the repeats; None in reports of versions that confirmed nothing, and where the settings of the recipe won."""
    confirmed = tuned.confirmation
    if confirmed is None:
        return None
    ends = {key: None if end is None else phrases.ratio(end) for key, end in confirmed.ratio.written().items()}
    row = next((number for number, trial in enumerate(tuned.trials, 1) if trial.point == confirmed.proposed.point), None)
    return {**ends, "repeats": confirmed.repeats, "taken": confirmed.taken, "row": row}
