"""Writes `flips.jsonl`: one line for each prediction that changed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from compress.artifacts import artifact
from compress.artifacts.run_folder import Run
from compress.core import candidates, relevance
from compress.core.engines import REFERENCE
from compress.core.tasks import TASKS
from compress.data.splits import Data
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

Flips = (
    RowFlips
    | SetFlips
    | TagFlips
    | SpanFlips
    | TranscriptFlips
    | TokenFlips
    | NeighbourFlips
    | FoundFlips
    | FirstFlips
    | NearestClassFlips
    | CaptionFlips
)


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
    facts = TASKS[run.recipe["model"]["task"]]
    if facts.generates:
        return TokenFlips(next(iter(run.variants.values())).path, data)
    if facts.tags:
        return TagFlips(data)
    if facts.finds_spans:
        return SpanFlips(data)
    if facts.transcribes:
        return TranscriptFlips(data)
    if facts.several:
        return SetFlips(data)
    if candidates.are_candidates(data.evaluation.labels):
        return FirstFlips(data)
    if facts.two_towers:
        return CaptionFlips(data) if facts.captioned else NearestClassFlips(data)
    if facts.embeds:
        return FoundFlips(data) if relevance.are_judged(data.evaluation.labels) else NeighbourFlips(data)
    return RowFlips(data)
