"""Follows the certificate of a cascade again from the predictions that are stored next to it.

Nothing is predicted, fitted or timed again: the scores have the parameters of cascade.json. The path, the tests and the thresholds have to
come out as they are written there, and the tiers have to be models of the run, the last one the original.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from export.cascade.certificate import allowed_share, alpha_of
from export.cascade.path import fastest_path
from export.cascade.stored import load
from export.cascade.tested import Bounds, Walk, certify_path, escalations
from foundation.artifacts.artifact import Artifact
from foundation.artifacts.cascade import FILE, Cascade, PathPoint
from foundation.artifacts.document import read
from foundation.core.errors import Problem

CLOSE = 1e-9
"""P-values and limits of other versions of SciPy may differ by as much, relative to them."""


def differences(folder: Path, checkpoints: Mapping[str, Artifact], baseline: str, exported: Artifact) -> Iterator[Problem]:
    """Yields a problem for each part of a certificate that does not follow.

    Args:
        folder: Folder of cascade.json.
        checkpoints: Checkpoints of the run by variant.
        baseline: Id of the original.
        exported: The artifact of the engines.

    Raises:
        DamagedArtifact: cascade.json cannot be read.
    """
    found, key = read(Cascade, folder / FILE), str(folder / FILE)
    wrong = [*_models(found, checkpoints, baseline, exported)]
    yield from (Problem(key, given) for given in wrong or _certificate(found, folder))


def _models(found: Cascade, checkpoints: Mapping[str, Artifact], baseline: str, exported: Artifact) -> Iterator[str]:
    """Yields what is wrong with the models."""
    digests = {name: artifact.digest for name, artifact in checkpoints.items()}
    if found.exported != exported.digest:
        yield "its engines are not those of the run"
    if (found.original.variant, found.original.digest) != (baseline, digests.get(baseline)):
        yield f"the original is {found.original.variant}, and not {baseline} of the run"
    for tier in found.tiers:
        if digests.get(tier.variant) != tier.checkpoint:
            yield f"tier {tier.number}: the checkpoint is not {tier.variant} of the run"
    if len(found.tiers) < 2 or found.tiers[-1].variant != baseline or found.tiers[-1].precision != "fp32":
        yield f"the last tier is not {baseline} in fp32"
    if any(tier.score is None for tier in found.tiers[:-1]):
        yield "a tier before the last one has no score"
    if any(one.cost_ms >= other.cost_ms for one, other in zip(found.tiers, found.tiers[1:], strict=False)):
        yield "the tiers are not in rising order of cost"


def _certificate(found: Cascade, folder: Path) -> Iterator[str]:
    """Yields what does not follow from the stored predictions."""
    certificate, written = found.certificate, found.certificate.path
    (chosen_on, selection_keys), (tested_on, keys) = (
        load(folder / file, found.task, certificate.distance) for file in (written.predictions, certificate.predictions)
    )
    if {len(chosen_on.tiers), len(tested_on.tiers)} != {len(found.tiers)} or len(keys) != certificate.n:
        yield f"{len(found.tiers)} tiers and {certificate.n} rows, and predictions of {len(tested_on.tiers)} for {len(keys)}"
        return
    if {row.tobytes() for row in keys} & {row.tobytes() for row in selection_keys}:
        yield "certificate rows are selection rows too"
    scores = [tier.score.score for tier in found.tiers if tier.score is not None]
    costs = [float(tier.cost_ms) for tier in found.tiers]
    known = chosen_on.seen(scores, costs)
    alpha = alpha_of(float(certificate.confidence))
    points = fastest_path(known, allowed_share(certificate.n, float(certificate.bound), alpha))
    if points != [point.thresholds for point in written.points]:
        yield "the path is not the one that follows from the selection rows"
        return
    limit = None if certificate.max_drop is None else float(certificate.max_drop.limit)
    times, bounds = [known.time_ms(point) for point in points], Bounds(float(certificate.bound), alpha, limit)
    tested = certify_path(tested_on, tested_on.seen(scores, costs), points, times, bounds, keys)
    for number, (one, other) in enumerate(zip(tested.points, written.points, strict=True)):
        if not _same(one, other):
            yield f"point {number} of the path: {one.disagreements} disagreements and p {one.p_value:.3g} follow from the predictions"
            return
    yield from _chosen(found, tested, alpha)


def _chosen(found: Cascade, tested: Walk, alpha: float) -> Iterator[str]:
    """Yields what is not as the chosen point says."""
    certificate = found.certificate
    if tested.chosen is None or tested.chosen != certificate.path.chosen:
        yield f"point {tested.chosen} of the path is the fastest that passes, and not {certificate.path.chosen}"
        return
    point = tested.points[tested.chosen]
    if tuple(tier.threshold for tier in found.tiers) != (*point.thresholds, None):
        yield "the thresholds of the tiers are not those of the chosen point"
    if certificate.disagreements != point.disagreements or not math.isclose(certificate.p_value, point.p_value, rel_tol=CLOSE):
        yield "the figures of the certificate are not those of the chosen point"
    limits = escalations(tested, certificate.n, alpha)
    same = [
        (one.units, one.n) == (other.units, other.n) and math.isclose(one.upper, other.upper, rel_tol=CLOSE)
        for one, other in zip(limits, found.escalation, strict=False)
    ]
    if len(limits) != len(found.escalation) or not all(same):
        yield "the limits of escalation are not those of the chosen point"


def _same(one: PathPoint, other: PathPoint) -> bool:
    counts = (one.disagreements, one.escalated, one.passed) == (other.disagreements, other.escalated, other.passed)
    return counts and math.isclose(one.p_value, other.p_value, rel_tol=CLOSE)
