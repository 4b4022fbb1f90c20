"""The stage `cascade`: small models answer the rows that they are sure of, and the original the others, with a certificate.

    selection rows     choose the tiers, fit the scores and fix the path of thresholds     `tiers`, `scores`, `path`
    certificate rows   test the points of the path, the most careful one first             `tested`, `certificate`
    evaluation rows    give the lengths and the mix of the times in the report             `times`

Each tier answers in the engine that serves it, in the batches of the evaluation. Its answers are compared with the original's in torch, so
that the certificate is about the model that the user has, whatever the engines round. The bound holds for rows drawn like the certificate
rows, with the given confidence over draws of these rows; a mix that changes later is no longer what it is about.

Numbers and vectors are other answers where they are farther from the original's than `max_distance`.

Left out: cascades of answers without scores (spans, transcripts), of rankings and searches, and of long texts that are read in windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from export.cascade.certificate import allowed_share, most_errors, units_needed
from export.cascade.losses import disagreements, form_of
from export.cascade.settings import CascadeSettings
from foundation.artifacts import cascade as document
from foundation.artifacts.artifact import Artifact, write_json
from foundation.artifacts.document import read
from foundation.artifacts.exported import Exported
from foundation.core.arrays import Array
from foundation.core.errors import InputError
from foundation.core.step_names import BASELINE
from foundation.data.splits import CertifyRows
from foundation.labels.tasks import TASKS, tasks_with
from foundation.standalone.confidence import CALIBRATED, DISTANCES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from export.cascade.path import Thresholds
    from export.cascade.tested import Answers, Bounds, Walk
    from export.cascade.tiers import Candidate
    from foundation.core.json_value import Json
    from foundation.data.splits import Data
    from foundation.labels.tasks import Task
    from foundation.models.size import Passes
    from foundation.stage.context import Context
    from foundation.standalone.confidence import Score
    from foundation.standalone.preprocess import Row

EXPORTED = "export.json"
CERTIFY, SELECTION = "certify.safetensors", "selection.safetensors"
BATCH_SIZE = 32


class Cascade(CascadeSettings):
    """Small models answer the rows that they are sure of, the original the others; a certificate says how often answers differ."""

    VERSION: ClassVar[int] = 2

    def depends(self, context: Context) -> dict[str, Json]:
        """Returns the digest of the certificate rows, and of the latencies that choose the tiers."""
        rows, latency = context.data.certify, context.latency
        return {"certify": None if rows is None else rows.digest, "latency": None if latency is None else latency.digest}

    def work(self, passes: Passes, data: Data) -> float:
        """A pass of the original over selection and certificate rows, and passes of the tiers."""
        rows = len(data.selection) + (0 if data.certify is None else len(data.certify))
        return float(passes.before + passes.after) * rows

    def check(self, config: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context) -> None:
        """Checks that answers have scores, and that there are certificate rows enough for the bound.

        Raises:
            InputError: They have none, there are too few rows, or labels or a distance are missing.
        """
        self._distance(form_of(context.task, self.key), context.task)
        if context.aggregate:
            raise InputError(self.key, "given with data.windows", "a cascade reads each row at once", "leave one of them out")
        self._rows(context)

    def _distance(self, form: str, task: Task) -> None:
        """Raises where a distance is needed and not given, or given and not needed."""
        key, far = f"{self.key}.max_distance", TASKS[task].answer.FAR
        if form in DISTANCES and self.max_distance is None:
            given = f"missing for {task}, whose answers are never quite the same"
            raise InputError(key, given, f"{far} above which an answer is another one is needed", "give it")
        if form not in DISTANCES and self.max_distance is not None:
            able = tasks_with(lambda row: row.confidence in DISTANCES)
            raise InputError(key, f"given for {task}, whose answers are the same or not", f"{able} is allowed", "leave it out")
        if form in DISTANCES and self.score not in ("auto", CALIBRATED):
            given = f"{self.score} given for {task}, whose answers are no probabilities"
            raise InputError(f"{self.key}.score", given, f"auto or {CALIBRATED} is allowed", f"give {CALIBRATED}")

    def _rows(self, context: Context) -> CertifyRows:
        """Returns the certificate rows; raises if they are too few."""
        rows = context.data.certify
        assert rows is not None, "the recipe is checked for it"
        needed = units_needed(self.max_disagreement, self.alpha)
        if len(rows) < needed:
            given = f"{len(rows)} rows given for max_disagreement {self.max_disagreement:g} at confidence {self.confidence:g}"
            more = units_needed(self.max_disagreement, self.alpha, errors=3)
            allowed = f"{needed} are needed if none of them is answered otherwise, {more} if three are"
            raise InputError("data.certify.files", given, allowed, "give more rows, a larger bound or less confidence")
        if self.max_drop is not None and rows.labels is None:
            classes = TASKS[context.task].confidence in ("class", "set")
            remedy = "give columns.label there" if classes else "leave it out: only labels of classes are read there"
            raise InputError(f"{self.key}.max_drop", "given, and the certificate rows have no labels", remedy=remedy)
        return rows

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Json]:
        """Writes `cascade.json` and the predictions that the certificate follows from.

        Returns:
            `tiers` (ids of the variants), `bound`, `confidence`, `n`, `disagreements` and `kept` (share of certificate rows that the tiers
            before the last one answer).

        Raises:
            InputError: There are too few rows, no tier is faster than the original, or the original in its engine is too far from torch.
            EngineError: An engine failed.
        """
        from export.cascade.path import fastest_path
        from export.cascade.stored import keys_array, save
        from export.cascade.tested import Answers, Bounds, certify_path

        certify, selection = self._rows(context), context.data.selection
        rows = [*selection.rows, *certify.rows]
        count, reference = len(selection), _in_torch(context, rows)
        tiers, logits, scores, areas = self._tiers(parent, context, rows, reference)
        costs = [tier.cost_ms for tier in tiers]
        chosen_on = Answers(context.task, reference[:count], [one[:count] for one in logits], limit=self.max_distance)
        tested_on = Answers(context.task, reference[count:], [one[count:] for one in logits], certify.labels, self.max_distance)
        known = chosen_on.seen(scores, costs)
        points = fastest_path(known, allowed_share(len(certify), self.max_disagreement, self.alpha))
        times = [known.time_ms(point) for point in points]
        bounds, keys = Bounds(self.max_disagreement, self.alpha, self.max_drop), keys_array(certify.keys)
        tested = certify_path(tested_on, tested_on.seen(scores, costs), points, times, bounds, keys)
        self._require(tested, len(certify))
        save(out / SELECTION, chosen_on, selection.keys)
        save(out / CERTIFY, tested_on, certify.keys)
        found = self._document(context, parent, tiers, scores, tested_on, tested, bounds)
        found = found.with_(scores=tuple(areas), times=_times(parent, context, tiers, scores, tested.points[tested.chosen or 0].thresholds))
        write_json(out / document.FILE, found.written())
        return _figures(found, context)

    def _require(self, tested: Walk, n: int) -> None:
        """Raises if the most careful point does not pass."""
        if tested.chosen is not None:
            return
        first, most = tested.points[0], most_errors(n, self.max_disagreement, self.alpha)
        how = "otherwise than in torch" if self.max_distance is None else f"farther than {self.max_distance:g} from torch"
        given = f"the original in its engine answers {first.disagreements} of {n} certificate rows {how}"
        given += f", and at most {most} can pass for max_disagreement {self.max_disagreement:g}"
        if self.max_drop is not None:
            given += f" (p {first.p_value:.3g} with max_drop {self.max_drop:g})"
        raise InputError(self.key, given, remedy="give a larger bound or more rows")

    def _tiers(
        self, parent: Artifact, context: Context, rows: Sequence[Row], reference: Array
    ) -> tuple[list[Candidate], list[Array], list[Score], list[dict[str, float]]]:
        """Returns the tiers, their predictions for the rows, the scores of all but the last, and the AUROCs of compared scores."""
        from export.cascade.scores import Judged, choose
        from export.cascade.tiers import best, candidates, faster, named, original
        from foundation.artifacts.timed import read_latency
        from foundation.standalone.confidence import confidence

        count, key = len(context.data.selection), f"{self.key}.tiers"
        assert context.latency is not None, "the engines are timed before this stage"
        builds, latency = read(Exported, parent.path / EXPORTED).builds, read_latency(context.latency.path)
        found = candidates(builds, latency, context.target.device, _lengths(context))
        last = original(found, context.baseline.id, self.key)
        names = None if self.tiers is None else [context.baseline.id if name == BASELINE else name for name in self.tiers]
        before = faster(found, last, key) if names is None else named(found, names, last, key)[:-1]
        logits = [_in_engine(one, parent, context, rows) for one in (*before, last)]
        _same_width(before, logits, reference, key)
        form = form_of(context.task, self.key)
        wrong = [disagreements(context.task, reference, one, self.max_distance) for one in logits]
        apart = [TASKS[context.task].answer.apart(reference, one)[:count] if form in DISTANCES else None for one in logits]
        judged = [
            Judged(one[:count], reference[:count], ~other[:count], form, far)
            for one, other, far in zip(logits[:-1], wrong, apart, strict=False)
        ]
        fitted = [choose(one, self.score, f"{self.key}.score") for one in judged]
        numbers = tuple(range(len(before)))
        if names is None:
            allowed = allowed_share(len(rows) - count, self.max_disagreement, self.alpha)
            known = {
                number: (before[number], confidence(judged[number].logits, fitted[number][0]), wrong[number][:count]) for number in numbers
            }
            numbers = best(known, (last, wrong[-1][:count]), allowed)
        chosen = [before[number] for number in numbers]
        scores, areas = [fitted[number][0] for number in numbers], [fitted[number][1] for number in numbers]
        return [*chosen, last], [*(logits[number] for number in numbers), logits[-1]], scores, areas

    def _document(
        self,
        context: Context,
        parent: Artifact,
        tiers: Sequence[Candidate],
        scores: Sequence[Score],
        answers: Answers,
        tested: Walk,
        bounds: Bounds,
    ) -> document.Cascade:
        """Returns the contents of cascade.json, without its times."""
        from export.cascade.tested import escalations

        certify = context.data.certify
        assert certify is not None, "checked before"
        assert tested.chosen is not None, "checked before"
        point, n = tested.points[tested.chosen], len(certify)
        beyond = [n, *point.escalated, 0]
        path = document.WalkedPath(
            selection_rows=len(context.data.selection), predictions=SELECTION, points=tested.points, chosen=tested.chosen
        )
        certificate = document.Certificate(
            bound=bounds.disagreement,
            max_distance=self.max_distance,
            confidence=self.confidence,
            n=n,
            disagreements=point.disagreements,
            p_value=point.p_value,
            max_drop=tested.drop,
            rows_sha256=certify.digest,
            rows_shared=certify.shared,
            predictions=CERTIFY,
            path=path,
        )
        return document.Cascade(
            schema_=1,
            task=context.task,
            unit="row",
            original=document.OriginalModel(variant=context.baseline.id, digest=context.baseline.digest),
            exported=parent.digest,
            tiers=tuple(
                _tier(number, one, score, threshold, int(answers.wrong(number).sum()), context)
                for number, (one, score, threshold) in enumerate(zip(tiers, (*scores, None), (*point.thresholds, None), strict=True))
            ),
            certificate=certificate,
            escalation=escalations(tested, n, bounds.alpha),
            rows_per_tier=tuple(one - other for one, other in itertools.pairwise(beyond)),
        )


def _same_width(tiers: Sequence[Candidate], logits: Sequence[Array], reference: Array, key: str) -> None:
    """Raises where a tier answers with another number of values than the original: how far such vectors are apart is not known."""
    for one, found in zip(tiers, logits, strict=False):
        if found.shape != reference.shape:
            given = f"{one.title} answers with {found.shape[-1]} numbers"
            raise InputError(key, given, f"{reference.shape[-1]}, as the original, are allowed", "name tiers without it")


def _tier(number: int, one: Candidate, score: Score | None, threshold: float | None, wrong: int, context: Context) -> document.Tier:
    variant, precision, float_precision, engine, mode = one.key
    return document.Tier(
        number=number + 1,
        variant=variant,
        precision=precision,
        float_precision=float_precision,
        engine=engine,
        mode=mode,
        build=one.build.folder,
        checkpoint=context.checkpoints[variant].digest,
        cost_ms=one.cost_ms,
        score=None if score is None else document.ScoreOfTier(**score),
        threshold=threshold,
        disagreements_alone=wrong,
    )


def _in_torch(context: Context, rows: Sequence[Row]) -> Array:
    """Returns the predictions of the original in torch, fp32."""
    from foundation.machine.device import computing_device
    from foundation.measure.predictions import predict
    from foundation.models.checkpoint import load

    folder = context.baseline.path
    return predict(load(folder, computing_device()), context.preprocessor(folder), rows, BATCH_SIZE, context.progress)


def _in_engine(one: Candidate, parent: Artifact, context: Context, rows: Sequence[Row]) -> Array:
    """Returns the predictions of a tier in its engine."""
    from foundation.measure.engine_process import EngineProcess

    assert context.engine_job is not None, "a run opens engines"
    with EngineProcess(context.engine_job(parent.path, one.build, one.engine, False)) as process:
        return process.predict(rows, max(1, *context.target.batch_sizes))


def _lengths(context: Context) -> Array:
    """Returns the length that each evaluation row is padded to, int64 `[n]`; 0 for rows of one size."""
    rows = context.data.evaluation.rows
    found = np.zeros(len(rows), np.int64)
    for length, members in context.preprocessor(context.baseline.path).groups(rows).items():
        found[members] = length
    return found


def _times(
    parent: Artifact, context: Context, tiers: Sequence[Candidate], scores: Sequence[Score], thresholds: Thresholds
) -> document.LiveMix:
    """Returns the times at the live mix: of evaluation rows, as they go through the cascade."""
    from export.cascade.times import live_mix
    from foundation.measure.answers import load_logits
    from foundation.standalone.confidence import confidence, route

    logits = [load_logits(parent.path / str(one.engine.predictions)) for one in tiers[:-1]]
    answering = route([confidence(one, score) for one, score in zip(logits, scores, strict=True)], thresholds)
    asked = [*(threshold is not None for threshold in thresholds), True]
    return live_mix([one.clock for one in tiers], asked, _lengths(context), answering)


def _figures(found: document.Cascade, context: Context) -> dict[str, Json]:
    """Logs the certificate; returns the figures for the manifest."""
    certificate, tiers = found.certificate, [tier.variant for tier in found.tiers]
    kept = 1 - found.rows_per_tier[-1] / certificate.n
    context.progress.log(
        f"  {' -> '.join(tiers)}: at most {certificate.bound:.2%} of answers differ from {found.original.variant} in torch, with "
        f"confidence {certificate.confidence:g} ({certificate.disagreements} of {certificate.n} rows do)"
    )
    names = TASKS[found.task].counts
    context.progress.log(f"  {kept:.1%} of the {names} are answered before the last tier")
    if not kept:
        context.progress.warn(
            f"cascade: no tier before {tiers[-1]} keeps a row at this bound; {tiers[-1]} alone answers as much in less time"
        )
    elif idle := [tier.variant for tier in found.tiers[:-1] if tier.threshold is None]:
        context.progress.warn(f"cascade: {', '.join(idle)} keeps no row at this bound, as the next tier takes hardly longer; leave it out")
    return {
        "tiers": [*tiers],
        "bound": certificate.bound,
        "confidence": certificate.confidence,
        "n": certificate.n,
        "disagreements": certificate.disagreements,
        "kept": kept,
    }
