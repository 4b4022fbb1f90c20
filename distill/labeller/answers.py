"""Answers of a labeller, stored by content: a second run, another recipe or more rows ask only what is new.

    FOLDER/labeller-<digest of the model>/answers.sqlite     table answers: key -> answer
    key = blake2b(kind, prompt, gap, words)                  log-probabilities of words: float32 [2, W]
    key = blake2b(kind, prompt, settings, number)            texts: JSON

The folder is named after everything else that answers depend on: contents of the model and its number format, or URL and name of the model.
Answers are committed as they come, so that a run that was killed goes on after the last batch; SQLite lets several runs share the file.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from distill.labeller.prompts import Query
from distill.labeller.scorer import Asked, Sampled, Scorer
from foundation.artifacts.artifact import digest
from foundation.core.arrays import Array
from foundation.core.progress import Progress

FILE = "answers.sqlite"
WAIT_SECONDS = 600
"""How long a run waits for another one that writes."""


class Answers:
    """Log-probabilities and texts of a labeller, from its file or from the model, which is opened when it is needed first.

    Args:
        folder: Folder of the file.
        identity: What all answers depend on: JSON types.
        open_scorer: Opens the model.
        progress: Shows a bar and how many answers were stored.
    """

    VERSION: ClassVar[int] = 1
    """Incremented when equal queries would be answered otherwise."""

    def __init__(self, folder: Path, identity: dict[str, object], open_scorer: Callable[[], Scorer], progress: Progress) -> None:
        self.file = folder / f"labeller-{digest({**identity, 'version': self.VERSION})[:16]}" / FILE
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.progress, self._open, self._scorer = progress, open_scorer, None
        with self._connected() as stored, stored:
            stored.execute("CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer BLOB NOT NULL) WITHOUT ROWID")

    _scorer: Scorer | None

    @property
    def scorer(self) -> Scorer:
        """The model."""
        self._scorer = self._scorer or self._open()
        return self._scorer

    def scores(self, asked: Sequence[Asked], label: str) -> tuple[Array, int]:
        """Returns the answers to queries, float32 [n, 2, W] (see `Scorer.scores`), and how many the model was asked.

        Args:
            asked: Queries with equally many words each.
            label: Label of the progress bar.

        Raises:
            InputError: See `Scorer.scores`.
        """
        keys = [_key("scores", one.query.prompt, one.query.gap, one.words) for one in asked]
        with self._connected() as stored:
            known = {key: np.frombuffer(answer, np.float32).reshape(2, -1) for key, answer in self._read(stored, keys)}
            wanted = {key: one for key, one in zip(keys, asked, strict=True) if key not in known}  # equal queries are asked once
            if wanted:
                missing = list(wanted)
                with self.progress.bar(f"{label}: labeller", len(wanted)) as advance:
                    for indices, answers_b2W in self.scorer.scores(list(wanted.values())):
                        rows = [(missing[index], answer.astype(np.float32)) for index, answer in zip(indices, answers_b2W, strict=True)]
                        with stored:
                            stored.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", [(key, row.tobytes()) for key, row in rows])
                        known.update(rows)
                        advance(len(indices))
        return np.stack([known[key] for key in keys]), len(wanted)

    def texts(self, query: Query, count: int, sampled: Sampled, number: int) -> list[str | None]:
        """Returns drawn texts (see `Scorer.texts`).

        Args:
            query: How they are asked for.
            count: How many.
            sampled: How they are drawn.
            number: Number of this draw: equal calls with other numbers are other draws.
        """
        settings = [sampled.temperature, sampled.top_p, sampled.max_tokens, sampled.seed, count, number]
        key = _key("texts", query.prompt, query.gap, settings)
        with self._connected() as stored:
            for _, answer in self._read(stored, [key]):
                found: list[str | None] = json.loads(answer)
                return found
            own = replace(sampled, seed=int.from_bytes(key[:4], "big") >> 1)  # the key has the prompt, the seed and the number
            found = self.scorer.texts(query, count, own)
            with stored:
                stored.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, json.dumps(found).encode()))
        return found

    def _connected(self) -> AbstractContextManager[sqlite3.Connection]:
        return closing(sqlite3.connect(self.file, timeout=WAIT_SECONDS))

    def _read(self, stored: sqlite3.Connection, keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        found = (stored.execute("SELECT key, answer FROM answers WHERE key = ?", (key,)).fetchone() for key in keys)
        return [row for row in found if row is not None]


def _key(kind: str, *parts: object) -> bytes:
    return hashlib.blake2b(json.dumps([kind, *parts]).encode(), digest_size=16).digest()
