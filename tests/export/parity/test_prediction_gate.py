"""The gate of predictions of a language model: torch is asked once, for as many rows as the verdict takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.builds import Build
from export.parity import gate as gates
from export.parity.gate import Gate
from export.parity.own_rounding import BLOCKS, Rounding
from export.parity.torch_models import TorchModels
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.data.splits import Data, Split
from foundation.labels.next_token import labels_of
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from tests.foundation import tiny_gpt

LENGTH, ROWS = 33, 1000
BUILD = Build("quantize", Checkpoint(Path("quantize")), "w4a16", "baseline")


class Known(Gate):
    """Torch answers row i with the token i + t; with the rounding of an engine with what `rounded` says."""

    def __init__(self, context: Context) -> None:
        super().__init__(context, TorchModels())
        self.asked: list[tuple[Any, int]] = []
        self.rounded = 0.0

    def predicted(self, checkpoint: Checkpoint, way: Any, rows: Sequence[Any]) -> Any:
        self.asked.append(("rounded" if isinstance(way, Rounding) else way, len(rows)))
        return answers(rows, self.rounded if isinstance(way, Rounding) else 0.0, seed=1)


def answers(rows: Sequence[Any], others: float, seed: int = 2) -> np.ndarray:
    """Answers [n, T, 2] of which this share are others."""
    tokens = np.stack([row[1:] for row in rows]).astype(np.float32)
    drawn = np.random.default_rng([seed, len(rows), int(tokens[0, 0])]).random(tokens.shape)
    return np.stack([0.01 * drawn * (others > 0), np.where(drawn < others, -7, tokens)], axis=-1)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Known:
    rows = list(np.random.default_rng(0).integers(3, 1000, (ROWS, LENGTH)).astype(np.int32))
    split = Split(list(rows), labels_of(rows, LENGTH - 1))
    context = Context(
        task="text-generation",
        data=Data(split, split, split, ()),
        max_length=LENGTH,
        target=Target(),
        seed=0,
        progress=ConsoleProgress("silent"),
        scratch=tmp_path,
    )
    monkeypatch.setattr(gates, "predicts_streamed", lambda *_: False)
    monkeypatch.setattr(gates, "distinct", lambda _, way: way)
    return Known(context)


def verdict(gate: Known, others: float, rounding: Rounding | None = None, build: Build = BUILD) -> tuple[int, bool]:
    """The rows that an engine is asked until the verdict is settled, and whether it passes."""
    parts: list[Any] = []
    for done, count in zip([0, *gate.looks], gate.looks, strict=False):
        parts.append(answers(gate.split.rows[done:count], others))
        found = gate.compare(build, np.concatenate(parts), rounding, held=True)
        if found.settled:
            assert found.figures["n"] == count * (LENGTH - 1)
            assert found.figures["passed"] == (found.short is None)
            return count, found.short is None
    raise AssertionError("the last look settles it")


def test_an_engine_that_agrees_is_asked_few_rows_and_torch_no_more(gate: Known) -> None:
    assert gate.looks == [94, 188, 376, 752, 1000]
    assert verdict(gate, 0.0) == (94, True)
    assert gate.asked == [("integers", 94)]
    assert verdict(gate, 0.0) == (94, True)  # another mode: torch is not asked again
    assert gate.asked == [("integers", 94)]


def test_one_that_hardly_agrees_is_asked_more_rows_and_torch_only_the_new_ones(gate: Known) -> None:
    rows, passed = verdict(gate, 0.0004)
    assert (rows > 94, passed) == (True, True)
    assert [way for way, _ in gate.asked] == ["integers"] * len(gate.asked)
    assert sum(count for _, count in gate.asked) == rows


def test_one_that_does_not_agree_is_out_at_the_first_look(gate: Known) -> None:
    assert verdict(gate, 0.02) == (94, False)
    assert gate.asked == [("integers", 94)]


def test_what_rounds_by_itself_is_asked_until_the_sign_test_can_tell(gate: Known) -> None:
    gate.rounded = 0.025
    rows, passed = verdict(gate, 0.025, BLOCKS)  # 0.05 of 32 predictions are as in float in one of them alone
    assert passed
    assert rows == 376
    asked = {way: sum(count for known, count in gate.asked if known == way) for way, _ in gate.asked}
    assert asked == {"rounded": 376, "float": 376}, "the integers without its rounding are not needed"
    assert verdict(gate, 0.05, BLOCKS)[1] is False


def test_all_rows_decide_where_there_are_no_more(gate: Known) -> None:
    gate.rounded = 0.002
    rows, _ = verdict(gate, 0.002, BLOCKS)
    assert rows == ROWS


def test_halves_are_compared_on_the_first_rows_alone(gate: Known) -> None:
    found = gate.compare(BUILD, answers(gate.split.rows[:94], 0.5), None, held=False)
    assert (found.settled, found.short) == (True, None)


def test_other_tasks_look_once(gate: Known, tmp_path: Path) -> None:
    context = replace(gate._context, task="text-classification")
    assert Gate(context, TorchModels()).looks == [ROWS]


def test_a_checkpoint_is_loaded_once_for_all_ways_that_need_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from export.parity import torch_models

    loaded: list[str] = []
    for name in ("load", "load_float"):
        original = getattr(torch_models, name)
        monkeypatch.setattr(torch_models, name, lambda folder, name=name, original=original: loaded.append(name) or original(folder))
    models, first, second = TorchModels(), Checkpoint(tiny_gpt.checkpoint("gpt2")), Checkpoint(tiny_gpt.checkpoint("mistral"))
    for checkpoint in (first, first, second, first):
        for way in ("integers", "float", "nudged"):
            with models.open(checkpoint, way) as model:
                assert not model.training
    assert loaded == ["load_float"] * 3
    monkeypatch.setattr(torch_models, "KEPT_SHARE", 0.0)
    for _ in range(2):
        with models.open(first, "float"):
            pass
    assert loaded == ["load_float"] * 4, "what takes too much memory is not kept"
