"""The cascade in the stage `triton_repo`: written next to the models of the builds, served, and compared with the engines of its tiers.

every evaluation row over gRPC -> the tier that answers it -> its logits are those of that engine, and the tier is the one that the
                                                              predictions of the engines say
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foundation.artifacts.artifact import Artifact
from foundation.artifacts.cascade import FILE, Cascade
from foundation.artifacts.document import read
from foundation.artifacts.triton import CascadeModel
from foundation.core.target import Target
from foundation.labels.form import Labels
from foundation.measure.agreement import compare_predictions, shortfall
from foundation.measure.answers import load_logits, save_predictions
from foundation.measure.metrics import metrics
from foundation.standalone.confidence import confidence, route
from foundation.standalone.tolerance import disagreements_allowed
from triton_repo.cascade.layout import NAME, ServedCascade, cascade_of, write_cascade
from triton_repo.cascade.settings import Audit
from triton_repo.client import Answers, ServedWrong, evaluate, latency
from triton_repo.config import Scheduling
from triton_repo.queueing import Queue
from triton_repo.tuning.space import Point

if TYPE_CHECKING:
    from foundation.labels.tasks import Task
    from foundation.stage.context import Context

CONCURRENCY = 16
"""Concurrent requests during the evaluation: enough for the server to form batches."""


@dataclass(frozen=True)
class CascadeInRepository:
    """A cascade of a run, and how it is served."""

    cascade: ServedCascade
    audit: Audit
    pairs: bool
    """Whether rows are pairs of texts."""
    target: Target
    name: str = NAME

    @property
    def entry(self) -> CascadeModel:
        """Its entry in triton.json, before it is measured."""
        return CascadeModel(model=self.name, audited_share=self.audit.share, false_alarm=self.audit.false_alarm)

    def write(self, out: Path, point: Point, queue: Queue, threads: int | None) -> None:
        """Writes it into a repository.

        Args:
            out: The repository; created.
            point: Processes, largest batch and queue delay.
            queue: Limits of the queue.
            threads: CPU threads of each process; None: as many as the evaluated engines.
        """
        write_cascade(
            out,
            self.cascade,
            self.audit,
            pairs=self.pairs,
            batch_sizes=self.target.batch_sizes,
            max_batch_size=point.max_batch_size,
            scheduling=Scheduling(point.instances, point.max_queue_delay_us, queue, threads),
        )

    def measured(self, repository: Path | None, context: Context, out: Path, concurrency: Sequence[int]) -> CascadeModel:
        """Serves it alone, evaluates and times it.

        Args:
            repository: Holds it, without limits of the queue; None: it is not served.
            context: The context of the stage.
            out: Folder for its predictions.
            concurrency: Numbers of concurrent requests at which it is timed.

        Raises:
            ServedWrong: Its answers are not those of its engines.
            ServerError: The server did not start.
            RequestError: A request failed.
        """
        if repository is None:
            return self.entry.with_(reason="serve: false", n=0)
        from triton_repo import environment
        from triton_repo.server import TritonServer

        split, log = context.data.evaluation, context.scratch / f"triton-{self.name}.log"
        rows = list(split.rows)
        with TritonServer(repository, environment.check(), log, models=[self.name]) as server:
            with context.progress.bar(f"triton {self.name}", len(rows)) as advance:
                answers = evaluate(server.grpc_address, self.name, rows, CONCURRENCY, advance)
            times = tuple(latency(server.grpc_address, self.name, rows, count) for count in concurrency)
            memory = server.peak_memory_bytes()
        compared = compare(self.cascade, context.task, answers, split.labels)
        logits = answers.stored_predictions(self.cascade.tiers[0].prepared)
        predictions = f"{self.name}.safetensors"
        save_predictions(out / predictions, logits, split.labels)
        figures, count = metrics(context.task, logits, split.labels), split.labels.count()
        context.progress.log(
            f"  {self.name} in Triton: {context.facts.metric} {figures[context.facts.metric]:.4f} (n={count}), rows by tier "
            f"{', '.join(map(str, compared.rows_per_tier))}, {compared.disagreements} answers differ from the engines, "
            f"p50 {times[0].p50_ms:.2f} ms"
        )
        known = {name: getattr(compared, name) for name in ("disagreements", "median_abs", "max_abs", "rows_per_tier", "routed_otherwise")}
        return self.entry.with_(
            metrics=figures, n=count, predictions=predictions, peak_memory_bytes=memory, latency=times, reason=None, **known
        )


def opened_cascade(exported: Artifact, context: Context, audit: Audit) -> CascadeInRepository | None:
    """Returns the cascade of a run; None where it has none.

    Args:
        exported: The artifact of `export`.
        context: The context of the stage.
        audit: How it is watched.

    Raises:
        InputError: A tier cannot be served.
    """
    if context.cascade is None:
        return None
    cascade = cascade_of(exported, read(Cascade, context.cascade.path / FILE))
    return CascadeInRepository(cascade, audit, isinstance(context.data.evaluation.rows[0], tuple), context.target)


def compare(cascade: ServedCascade, task: Task, answers: Answers, labels: Labels) -> CascadeModel:
    """Checks the outputs of the server against its logits, its logits against the engines', and its tiers against their predictions.

    Args:
        cascade: The cascade.
        task: Its task.
        answers: The answers of the server.
        labels: Labels of the evaluation split.

    Returns:
        `disagreements`, `median_abs`, `max_abs`, `rows_per_tier` and `routed_otherwise`.

    Raises:
        ServedWrong: A difference exceeds its limit.
    """
    prepared = cascade.tiers[0].prepared
    wrong = answers.contradiction(prepared)
    if wrong is not None:
        raise ServedWrong(f"model {NAME}: {wrong}")
    assert answers.tiers is not None, "a cascade names its tiers"
    stored = [load_logits(tier.predictions) for tier in cascade.tiers if tier.predictions is not None]
    assert len(stored) == len(cascade.tiers), "engines that are served were evaluated"
    otherwise = int((answers.tiers != routed(cascade, stored)).sum())
    if otherwise > disagreements_allowed(len(answers.tiers)):
        raise ServedWrong(f"model {NAME}: {otherwise} of {len(answers.tiers)} rows were answered by another tier than the engines say")
    expected = np.stack(stored)[answers.tiers - 1, np.arange(len(answers.tiers))]
    compared = compare_predictions(task, expected, answers.stored_predictions(prepared), labels)
    reason = shortfall(compared, "the evaluated engines")
    if reason is not None:
        raise ServedWrong(f"model {NAME} in Triton: {reason}")
    rows = np.bincount(answers.tiers - 1, minlength=len(stored))
    return CascadeModel(
        disagreements=compared["disagreements"],
        median_abs=compared["median_abs"],
        max_abs=compared["max_abs"],
        rows_per_tier=tuple(int(count) for count in rows),
        routed_otherwise=otherwise,
    )


def routed(cascade: ServedCascade, logits: Sequence[NDArray[np.float32]]) -> NDArray[np.int64]:
    """Returns the tier that answers each row, from 1, int64 [n].

    Args:
        cascade: The cascade.
        logits: Logits of each tier, float32 [n, C] each.
    """
    tiers = [tier for tier in cascade.document.tiers if tier.score is not None]
    scores = [confidence(one, tier.score.score) for one, tier in zip(logits, tiers, strict=False) if tier.score is not None]
    found: NDArray[np.int64] = route(scores, [None if tier.threshold is None else float(tier.threshold) for tier in tiers]) + 1
    return found
