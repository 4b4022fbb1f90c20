"""Watches the answers of a cascade, in a thread of its own: is what was certified still true of the rows that come?

    test                  value of a request                                                              bound
    escalation_<tier>     share of its rows that went beyond this tier                                    upper limit at certification
    disagreement          share of its audited rows that the last tier answers otherwise                  the certified bound

A row is audited with probability `audit`, drawn before it is known who answers it. The last tier then answers it too, unless it did; an
escalated row agrees with itself. So the mean of the second test is the disagreement that was certified, of all rows, and a drift that the
first tiers are confident about is seen as well: escalation alone would not show it.

Each test is an e-process (`e_process`). With T tests in I processes each rings with a probability of at most `false_alarm` / (T I), so the
probability that any of them ever rings without cause is at most `false_alarm`, from one start of the server to the next. The promise is for
requests whose rates do not rise above the bounds whatever came before, such as independent ones of one distribution.

The audit is off the answer's path: rows wait in a queue of at most `MOST_WAITING` requests, beyond which audits are left out and counted. A
row of the audit and one that is answered may meet at the last tier; the second waits for the first, one row.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .e_process import EProcess
from .metrics import Metrics
from .tiers import Answer, Columns, Model

MOST_WAITING = 1000
SEND_SECONDS = 1.0
"""Time between two messages with metrics."""
CLOSE_SECONDS = 30.0
DISAGREEMENT, ESCALATION = "disagreement", "escalation_"


@dataclass(frozen=True)
class Seen:
    """A request and its answer."""

    columns: Columns
    """The inputs of its audited rows alone, bytes [k, 1] each."""
    answer: Answer
    audited: NDArray[np.intp]
    """Places of the audited rows, [k]."""


class Watch:
    """The tests, what was counted, and the thread.

    Args:
        last: The last tier.
        settings: `escalation` (a bound for each tier but the last), `disagreement` (bound), `form` of the answers, `limit` (distance above
            which a value or a vector is another answer; null for others), `audit`, `false_alarm`, `instances`.
        metrics: Where values are sent.
        name: Of the model, for messages.
    """

    def __init__(self, last: Model, settings: Mapping[str, Any], metrics: Metrics, name: str) -> None:
        self._last, self._metrics, self._name = last, metrics, name
        self._audit, self._form, self._limit = float(settings["audit"]), str(settings["form"]), settings["limit"]
        bounds = {f"{ESCALATION}{tier}": bound for tier, bound in enumerate(settings["escalation"], 1)}
        if self._audit:
            bounds[DISAGREEMENT] = settings["disagreement"]
        self.tests = {test: EProcess(bound) for test, bound in bounds.items() if 0 < bound < 1}
        self.alpha = settings["false_alarm"] / max(1, len(self.tests)) / settings["instances"]
        self.rows = np.zeros(len(settings["escalation"]) + 1, np.int64)
        """Rows that each tier answered, int64 [tiers]."""
        self.audited = self.disagreements = self.skipped = 0
        self._rung: set[str] = set()
        self._draw = np.random.default_rng()
        self._waiting: SimpleQueue[Seen | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self.send()
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, after what waits."""
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)

    def note(self, columns: Columns, answer: Answer) -> None:
        """Notes a request and its answer; returns at once.

        Args:
            columns: The inputs of the request, bytes [n, 1] each.
            answer: The answer.
        """
        audited = np.flatnonzero(self._draw.random(len(answer.tiers)) < self._audit)
        if len(audited) and self._waiting.qsize() >= MOST_WAITING:
            self.skipped += len(audited)
            audited = audited[:0]
        self._waiting.put(Seen([column[audited] for column in columns], answer, audited))

    def take(self, seen: Sequence[Seen]) -> None:
        """Counts requests, audits their rows and bets on them."""
        tiers = [one.answer.tiers for one in seen]
        self.rows += np.bincount(np.concatenate(tiers) - 1, minlength=len(self.rows))
        for test, process in self.tests.items():
            if test == DISAGREEMENT:
                values = [value for one in seen if len(one.audited) and (value := self._disagreement(one)) is not None]
            else:
                values = [float((found > int(test.removeprefix(ESCALATION))).mean()) for found in tiers]
            process.update(np.array(values))
            self._ring(test, process)

    def send(self) -> None:
        """Sends all values to the server."""
        total = max(1, int(self.rows.sum()))
        for tier, count in enumerate(self.rows.tolist(), 1):
            self._metrics.send("rows_total", count, tier=str(tier))
            if tier < len(self.rows):
                self._metrics.send("escalation_rate", int(self.rows[tier:].sum()) / total, tier=str(tier))
        for test, process in self.tests.items():
            self._metrics.send("log_e_value", float(process.log_values), test=test)
            self._metrics.send("alarm", float(test in self._rung), test=test)
        self._metrics.send("audited_rows_total", self.audited)
        self._metrics.send("audit_disagreements_total", self.disagreements)
        self._metrics.send("audit_skipped_rows_total", self.skipped)

    def _disagreement(self, one: Seen) -> float | None:
        """Returns the share of the audited rows of a request that the last tier answers otherwise; None where it fails."""
        mine, kept = one.answer.scored[one.audited], one.answer.tiers[one.audited] < len(self.rows)
        wrong = 0
        if kept.any():
            (found,) = self._last.predict([[column[kept] for column in one.columns]])
            if not hasattr(found, "logits"):  # an error, of which requests that get there tell
                self.skipped += len(one.audited)
                return None
            wrong = int(different(self._last.scored(found), mine[kept], self._form, self._limit).sum())
        self.audited += len(one.audited)
        self.disagreements += wrong
        return wrong / len(one.audited)

    def _ring(self, test: str, process: EProcess) -> None:
        """Says once that a test has refuted its bound."""
        if test in self._rung or not process.alarms(self.alpha):
            return
        self._rung.add(test)
        line = f"compress: cascade {self._name}: {test} is above {process.bound:g} (ln e-value {float(process.largest):.1f} >= "
        print(f"{line}{-math.log(self.alpha):.1f} after {process.count} requests)", file=sys.stderr, flush=True)

    def _run(self) -> None:
        sent = time.monotonic()
        while True:
            seen: list[Seen | None] = []
            try:
                seen.append(self._waiting.get(timeout=SEND_SECONDS))
                while len(seen) < MOST_WAITING:
                    seen.append(self._waiting.get_nowait())
            except Empty:
                pass
            if some := [one for one in seen if one is not None]:
                self.take(some)
            if None in seen or time.monotonic() - sent >= SEND_SECONDS:
                self.send()
                sent = time.monotonic()
            if None in seen:
                return


def different(last: NDArray[np.float32], others: NDArray[np.float32], form: str, limit: float | None) -> NDArray[np.bool_]:
    """Returns which rows have another answer, bool [n].

    class: the largest logit, of equal ones the first. set: the labels above 0. tags: the same of each word, where zeros are no word.
    value, vector: a distance above the limit, of vectors as a share of the length of the last tier's.

    Args:
        last: What the last tier answered, float32 [n, C], or [n, W, C] of words.
        others: What another tier answered, of the same shape, or of another number of words.
        form: class, set, tags, value or vector.
        limit: The limit of the distance; None for other forms.
    """
    if form == "set":
        return np.asarray(((last > 0) != (others > 0)).any(axis=1))
    if form == "tags":
        words = max(last.shape[1], others.shape[1])
        ours, theirs = (_tags(np.pad(one, ((0, 0), (0, words - one.shape[1]), (0, 0)))) for one in (last, others))
        return np.asarray((ours != theirs).any(axis=1))
    if limit is not None:
        apart = np.linalg.norm(last.astype(np.float64) - others, axis=1)
        return np.asarray(apart > limit * (np.linalg.norm(last.astype(np.float64), axis=1) if form == "vector" else 1.0))
    return np.asarray(last.argmax(axis=1) != others.argmax(axis=1))


def _tags(words: NDArray[np.float32]) -> NDArray[np.int64]:
    return np.where((words != 0).any(axis=-1), words.argmax(axis=-1), -1)
