"""Writes `flips.jsonl`: one line for each prediction that changed.

What a flip is follows from the form of the labels, whose row names a file in this room (`foundation.core.forms.table`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from compress.report.evaluations import evaluations
from compress.report.flips.captions import CaptionFlips
from compress.report.flips.classes import RowFlips
from compress.report.flips.ordered import FirstFlips
from compress.report.flips.searched import FoundFlips
from compress.report.flips.sets import SetFlips
from compress.report.flips.spans import SpanFlips
from compress.report.flips.tags import TagFlips
from compress.report.flips.tokens import TokenFlips
from compress.report.flips.transcripts import TranscriptFlips
from compress.report.flips.vectors import NeighbourFlips
from compress.report.flips.zero_shot import NearestClassFlips
from foundation.artifacts import artifact
from foundation.artifacts.run_folder import Run
from foundation.core.engines import REFERENCE
from foundation.core.forms.table import form_of
from foundation.data.splits import Data


class Flips(Protocol):
    """What the class in each file of this room gives; it is made from the data of a run."""

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the answer that counts, of each row or of each of its parts, whole numbers `[n, ...]`."""

    def line(self, place: tuple[int, ...], before: int, after: int, labels: np.ndarray) -> dict[str, Any]:
        """Describes the flip at a place of `answers`, from one number to another."""


DESCRIBED_BY: Mapping[str, Callable[[Data], Flips]] = {
    "captions": CaptionFlips,
    "classes": RowFlips,
    "ordered": FirstFlips,
    "searched": FoundFlips,
    "sets": SetFlips,
    "spans": SpanFlips,
    "tags": TagFlips,
    "transcripts": TranscriptFlips,
    "vectors": NeighbourFlips,
    "zero_shot": NearestClassFlips,
}
"""Describes the flips of a form, by the name of its file; tokens also need the tokenizer of a checkpoint."""


def write_flips(run: Run, data: Data) -> int:
    """Writes `flips.jsonl`: one line for each row (or token) whose prediction changed.

    Engines are compared with the backend before them, each variant in torch with the baseline in torch.

    Returns:
        The number of lines.
    """
    lines: list[dict[str, Any]] = []
    baseline: np.ndarray | None = None
    before: tuple[np.ndarray, str] | None = None
    describe = _described(run, data)
    for evaluation in evaluations(run):
        answers = describe.answers(evaluation.logits)
        if evaluation.backend == REFERENCE:
            reference, origin = (baseline, "baseline torch") if baseline is not None else (answers, "")
            baseline = answers if baseline is None else baseline
        else:
            assert before is not None
            reference, origin = before
        for place in np.argwhere(answers != reference):
            at = tuple(place.tolist())
            flip = describe.line(at, int(reference[at]), int(answers[at]), evaluation.labels)
            lines.append({"row": at[0], "variant": evaluation.variant, "from": origin, "to": evaluation.backend, **flip})
        before = (answers, evaluation.backend)
    artifact.write_text(run.folder / "flips.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return len(lines)


def _described(run: Run, data: Data) -> Flips:
    name = form_of(data.evaluation.labels).flips
    return TokenFlips(run.artifacts[run.baseline].path, data) if name == "tokens" else DESCRIBED_BY[name](data)
