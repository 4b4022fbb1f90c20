"""Writes `flips.jsonl`: one line for each prediction that changed.

What a flip is follows from the form of the labels, (`foundation.labels`), in one file each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from compress.report.evaluations import evaluations
from compress.report.flips.captions import CaptionFlips
from compress.report.flips.classes import RowFlips
from compress.report.flips.ordered import FirstFlips
from compress.report.flips.searched import RetrievalFlips
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
from foundation.data.splits import Data
from foundation.labels.candidates import Candidates
from foundation.labels.captions import Captions
from foundation.labels.form import Labels
from foundation.labels.label_sets import LabelSets
from foundation.labels.next_token import Tokens
from foundation.labels.relevance import Judged
from foundation.labels.spans import Spans
from foundation.labels.tags import Tags
from foundation.labels.text_groups import Groups
from foundation.labels.transcripts import Transcripts
from foundation.labels.vectors import Pairs
from foundation.labels.zero_shot import ImagesAndTexts
from foundation.measure.answers import load_logits


class Flips(Protocol):
    """Interface of the class in each file of this folder; it is made from the data of a run and their evaluation labels."""

    def answers(self, logits: np.ndarray) -> np.ndarray:
        """Returns the answer that counts, of each row or of each of its parts, whole numbers `[n, ...]`."""

    def line(self, place: tuple[int, ...], before: int, after: int) -> Mapping[str, object]:
        """Describes the flip at a place of `answers`, from one number to another."""


DESCRIBED_BY: Mapping[type[Labels], Callable[[Run, Data, Any], Flips]] = {
    Candidates: lambda run, data, labels: FirstFlips(data, labels),
    Captions: lambda run, data, labels: CaptionFlips(data, labels),
    ImagesAndTexts: lambda run, data, labels: NearestClassFlips(data, labels),
    Judged: lambda run, data, labels: RetrievalFlips(data, labels),
    LabelSets: lambda run, data, labels: SetFlips(data, labels),
    Spans: lambda run, data, labels: SpanFlips(data, labels),
    Tags: lambda run, data, labels: TagFlips(data, labels),
    Tokens: lambda run, data, labels: TokenFlips(run.artifacts[run.baseline].path, data, labels),
    Transcripts: lambda run, data, labels: TranscriptFlips(data, labels),
    Groups: lambda run, data, labels: NeighbourFlips(data, labels),
    Pairs: lambda run, data, labels: NeighbourFlips(data, labels),
}
"""By the form of labels what describes its flips; others are classes (`RowFlips`)."""


def write_flips(run: Run, data: Data) -> int:
    """Writes `flips.jsonl`: one line for each row (or token) whose prediction changed.

    Engines are compared with the backend before them, a server with the engine that it runs, and each variant in torch with the baseline
    in torch.

    Returns:
        The number of lines.
    """
    lines: list[Mapping[str, object]] = []
    baseline: np.ndarray | None = None
    before: tuple[np.ndarray, str] | None = None
    describe = _described(run, data)
    for evaluation in evaluations(run):
        answers = describe.answers(evaluation.logits)
        if evaluation.backend == REFERENCE:
            reference, origin = (baseline, "baseline torch") if baseline is not None else (answers, "")
            baseline = answers if baseline is None else baseline
        elif evaluation.behind is not None:
            reference, origin = describe.answers(load_logits(evaluation.behind.file)), evaluation.behind.engine
        else:
            assert before is not None
            reference, origin = before
        for place in np.argwhere(answers != reference):
            at = tuple(place.tolist())
            flip = describe.line(at, int(reference[at]), int(answers[at]))
            lines.append({"row": at[0], "variant": evaluation.variant, "from": origin, "to": evaluation.backend, **flip})
        before = (answers, evaluation.backend)
    artifact.write_text(run.folder / "flips.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return len(lines)


def _described(run: Run, data: Data) -> Flips:
    labels = data.evaluation.labels
    described = DESCRIBED_BY.get(type(labels))
    return RowFlips(data, labels) if described is None else described(run, data, labels)
