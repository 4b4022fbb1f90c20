"""The tiers of a cascade: each answers what it is sure of, and passes the other rows on.

    rows of all requests --> tier 1 --> rows below the threshold, of all requests --> tier 2 --> ...         the last tier keeps every row

Each tier is the model of a folder of its own, as it would be served alone (`triton_repo.cpu_model`): it groups rows by shape into batches,
whatever requests they are from. So escalated rows form batches of their own, and a row has the answer that the tier gives when it is served
alone. A tier that keeps no row is not run.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .confidence import Score, confidence, kept

Array = NDArray[Any]
Columns = list[Array]
"""The inputs of a request, bytes [n, 1] each."""


class Model(Protocol):
    """A model as it would be served alone."""

    def predict(self, requests: list[Columns]) -> list[Any]:
        """Returns for each request what was computed, with `logits`, float32 [n, ...]; or the response with an error."""

    def scored(self, predicted: Any) -> Array:
        """Returns the part of the logits that says how sure the answers are, float32 [n, ...]: of tags that of each word."""

    def response(self, predicted: Any, **more: Array) -> Any:
        """Returns the response to a request, with further outputs."""


class InTurn:
    """A model that two threads ask: one waits for the other, since an engine computes one batch at a time.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._lock = model, threading.Lock()

    def predict(self, requests: list[Columns]) -> list[Any]:
        """Does what the model does, in turn."""
        with self._lock:
            return list(self._model.predict(requests))

    def scored(self, predicted: Any) -> Array:
        """Does what the model does."""
        return np.asarray(self._model.scored(predicted))

    def response(self, predicted: Any, **more: Array) -> Any:
        """Does what the model does."""
        return self._model.response(predicted, **more)


@dataclass(frozen=True)
class Tier:
    """A model, and which rows it keeps."""

    model: Model
    score: Score | None
    """None: it keeps every row, as the last tier does."""
    threshold: float | None
    """It keeps rows of at least this score; None, with a score: none."""

    @property
    def keeps_none(self) -> bool:
        """Whether it need not be run."""
        return self.score is not None and self.threshold is None

    def keeps(self, scored: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Returns which rows it answers, bool [n].

        Args:
            scored: Result of `Model.scored`.
        """
        if self.score is None:
            return np.ones(len(scored), bool)
        found: NDArray[np.bool_] = kept(confidence(scored, self.score), self.threshold)
        return found


@dataclass
class Answer:
    """The answer to a request."""

    logits: NDArray[np.float32]
    """Logits of the tier that answered each row, float32 [n, ...]."""
    scored: NDArray[np.float32]
    """The part of them that the scores are of, float32 [n, ...]."""
    tiers: NDArray[np.int32]
    """That tier, from 1, int32 [n]."""
    model: Model
    """The first model that was asked."""
    predicted: Any
    """What it computed for all rows, for the form of the response."""

    def note(self, rows: NDArray[np.intp], logits: NDArray[np.float32], scored: NDArray[np.float32], tier: int) -> None:
        """Takes the answers of a tier to some rows; a request has the tokens and words of its longest row, with zeros after shorter ones.

        Args:
            rows: Numbers of the rows, [k].
            logits: Their logits, float32 [k, ...].
            scored: The part of them that the scores are of, float32 [k, ...].
            tier: Number of the tier, from 1.
        """
        for whole, found in ((self.logits, logits), (self.scored, scored)):
            (whole[:, : found.shape[1]] if found.ndim > 2 else whole)[rows] = found
        self.tiers[rows] = tier

    def response(self, **more: Array) -> Any:
        """Returns the response: what follows from the logits, and further outputs."""
        return self.model.response(replace(self.predicted, logits=self.logits), **more)


def answer(tiers: Sequence[Tier], requests: Sequence[Columns]) -> list[Any]:
    """Returns for each request its `Answer`, or the response with an error of the tier that failed.

    Args:
        tiers: The last one keeps every row.
        requests: The inputs of each request.
    """
    answers: list[Any] = [None] * len(requests)
    waiting = {index: np.arange(len(columns[0])) for index, columns in enumerate(requests)}
    for number, tier in enumerate(tiers, 1):
        if tier.keeps_none or not waiting:
            continue
        found = tier.model.predict([[column[rows] for column in requests[index]] for index, rows in waiting.items()])
        left = {}
        for (index, rows), one in zip(waiting.items(), found, strict=True):
            if not hasattr(one, "logits"):  # an error
                answers[index] = one
                continue
            scored = tier.model.scored(one)
            if answers[index] is None:
                count = len(requests[index][0])
                empty, none = (np.zeros((count, *array.shape[1:]), np.float32) for array in (one.logits, scored))
                answers[index] = Answer(empty, none, np.zeros(count, np.int32), tier.model, one)
            keeps = tier.keeps(scored)
            answers[index].note(rows[keeps], one.logits[keeps], scored[keeps], number)
            if not keeps.all():
                left[index] = rows[~keeps]
        waiting = left
    return answers


def load(folder: Path, name: str, config: Mapping[str, object]) -> Any:
    """Returns the model of a folder, prepared. Its modules are its own, though two tiers have modules of the same names.

    Args:
        folder: Holds model.py and what it reads.
        name: Unique among the models of this process.
        config: The configuration that the server gives the cascade.
    """
    spec = importlib.util.spec_from_file_location(name, folder / "model.py")
    assert spec is not None and spec.loader is not None, "a file that is there"  # noqa: PT018
    module, path = importlib.util.module_from_spec(spec), list(sys.path)
    own = {file.stem for file in folder.glob("*.py")}
    hidden = {one: sys.modules.pop(one) for one in own & sys.modules.keys()}
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        model = module.TritonPythonModel()
        model.initialize({"model_config": json.dumps(config)})
    finally:
        sys.path[:] = path
        for one in own:
            sys.modules.pop(one, None)
        sys.modules.update(hidden)
    return model
