"""Paired differences of two runs: the primary metric on the same evaluation rows.

Both runs hold the predictions of each of their models, in the order of the evaluation split. If the rows are the same, a row that both get
right, or both get wrong, cancels. The interval of the difference is computed as in a report (`compress.report.intervals.paired`), over the
same groups. The rows are the same if the digests of their contents and labels, in order, are equal (`evaluation_rows.sha256`). Runs of
earlier versions do not hold that digest; there the digest of all data decides, which is equal only if every split is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from compress.compare.sides import Side
from compress.report import evaluations, goals, intervals
from compress.report.served import predictions_of
from foundation.artifacts.run_folder import JUDGE, blaming_damage
from foundation.core.engines import REFERENCE
from foundation.core.step_names import EVALUATION
from foundation.measure.answers import load_groups, load_logits, load_predictions
from foundation.measure.fastest import NAMES
from foundation.measure.metrics import Metric

USUAL = "evaluation"
"""The split that models are judged on, unless they are candidates of a search."""


@dataclass(frozen=True)
class Model:
    """One model of a run in one backend, and the file of its predictions."""

    side: Side
    variant: str
    backend: str
    file: Path

    @property
    def names(self) -> dict[str, str]:
        """Its names in compare.json."""
        return {"run": self.side.key, "variant": self.variant, "backend": self.backend}


def pairs(sides: Sequence[Side]) -> list[dict[str, object]]:
    """Returns the difference of the primary metric between each run and each earlier one: of the served models, and of the models with the
    same name and backend in the first run.

    Returns:
        One map for each pair, see `Pair`. A pair of runs whose rows or metrics are not the same has one entry, with the
        reason.
    """
    found = []
    for place, second in enumerate(sides):
        for first in sides[:place]:
            reason = cannot_pair(first, second)
            found.append(_pair("served", served(first), served(second), reason))
            if first is sides[0] and reason is None:
                mine = {(model.variant, model.backend): model for model in models(first)}
                same = ((mine.get((model.variant, model.backend)), model) for model in models(second))
                found += [_pair("same name", one, other, None) for one, other in same if one is not None]
    return found


def cannot_pair(first: Side, second: Side) -> str | None:
    """Returns why figures of two runs cannot be paired row by row; None where they can."""
    if first.metric_name != second.metric_name:
        return f"another metric: {first.key} is judged by {first.metric_name}, {second.key} by {second.metric_name}"
    if first.metric is None:
        return f"the metric {first.metric_name} is not known to this version"
    digests = [_rows(side) for side in (first, second)]
    if None not in digests:
        return None if digests[0] == digests[1] else _other_rows(first, second)
    if _data(first) is not None and _data(first) == _data(second):  # the digest of all splits, judged on the same one
        return None
    with blaming_damage(first.run.folder), blaming_damage(second.run.folder):
        labels, others = (load_predictions(_baseline_file(side), side.run.recipe["model"]["task"])[1].array for side in (first, second))
    if not np.array_equal(labels, others):
        return _other_rows(first, second)
    silent = " and ".join(side.key for side, digest in zip((first, second), digests, strict=True) if digest is None)
    return f"run {silent} does not say which rows it was evaluated on, as it was written by an earlier version; `compress run` adds that"


def served(side: Side) -> Model | None:
    """Returns the served configuration of a run, in the last backend that evaluated it; None if none did."""
    backend, one = side.served_backend, side.report.served
    if backend is None:
        return None
    variant = goals.served_variant(side.report).id
    if backend == REFERENCE:
        return Model(side, variant, backend, side.run.predictions(variant))
    if one is not None:
        with blaming_damage(side.run.folder):
            return Model(side, variant, backend, predictions_of(side.run, {name: getattr(one, name) for name in NAMES})[backend])
    return next((model for model in models(side) if (model.variant, model.backend) == (variant, backend)), None)


def models(side: Side) -> Iterator[Model]:
    """Yields the models of a run as its report lists them: every variant in torch, in the engines in their recommended mode, and behind
    the server."""
    with blaming_damage(side.run.folder):
        for one in evaluations.stored(side.run):
            yield Model(side, one.variant, one.backend, one.file)


def difference(metric: Metric, first: Model, second: Model) -> dict[str, object]:
    """Returns what the second model loses against the first one on the same rows, as `compress.report.intervals.paired` does, and both
    values as `first_value` and `second_value`."""
    with blaming_damage(first.side.run.folder), blaming_damage(second.side.run.folder):
        before, labels = load_predictions(first.file, first.side.run.recipe["model"]["task"])
        after = load_logits(second.file)
        values = {f"{name}_value": metric.of(*labels.values(logits)) for name, logits in (("first", before), ("second", after))}
        return {**values, **intervals.paired(metric, before, after, labels, groups=_groups(first.side, second.side)).written()}


def _pair(kind: str, first: Model | None, second: Model | None, reason: str | None) -> dict[str, object]:
    """Returns the entry of a pair; one that cannot be compared has a reason, and no figures."""
    if reason is None and (first is None or second is None):
        reason = "one of the runs evaluated nothing that it serves"
    named: dict[str, object] = {"kind": kind, "first": first and first.names, "second": second and second.names, "reason": reason}
    if reason is not None or first is None or second is None:
        return named
    metric = first.side.metric
    assert metric is not None, "cannot_pair has seen to that"
    return {**named, **difference(metric, first, second)}


def _groups(first: Side, second: Side) -> np.ndarray | None:
    """Returns the groups that rows are drawn in. A run of an earlier version has none; where both have others (documents that one data
    set names and the other does not), the fewer ones, over which the interval is the wider."""
    known = [groups for side in (first, second) if (groups := load_groups(_baseline_file(side))) is not None]
    count: Callable[[np.ndarray], int] = lambda groups: len(np.unique(groups))  # noqa: E731
    return min(known, key=count, default=None)


def _rows(side: Side) -> str | None:
    """Returns the digest of the rows that a run was evaluated on; None in runs of earlier versions."""
    shared = evaluations.shared_rows(side.run)
    return None if shared is None else shared.sha256


def _data(side: Side) -> tuple[str, str] | None:
    """Returns the digest of all data of a run and the split that it was judged on; None where it is not known."""
    depends = side.run.artifacts[f"{EVALUATION}{side.run.baseline}"].manifest.get("depends_on")
    if depends is None or "data" not in depends:
        return None
    note = side.run.folder / JUDGE
    judge = depends["judge"] if "judge" in depends else note.read_text(encoding="utf-8").strip() if note.is_file() else USUAL
    return str(depends["data"]), str(judge)


def _other_rows(first: Side, second: Side) -> str:
    counts = [side.run.artifacts[f"{EVALUATION}{side.run.baseline}"].metrics["n"] for side in (first, second)]
    if counts[0] != counts[1]:
        return f"other evaluation rows: {first.key} has {counts[0]}, {second.key} has {counts[1]}"
    return f"other evaluation rows: {counts[0]} in both runs, with other contents, labels or order"


def _baseline_file(side: Side) -> Path:
    return side.run.predictions(side.run.baseline)
