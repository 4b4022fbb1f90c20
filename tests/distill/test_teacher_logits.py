"""The logits of a teacher are those of its forward pass, and computed once for everybody who shares the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from foundation.models.checkpoint import load
from foundation.models.forward import forward
from foundation.stage.context import Context
from foundation.training import teacher_logits as module
from foundation.training.rows import Rows
from foundation.training.teacher_logits import FILE, teacher_logits


@pytest.fixture
def known(checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> tuple[Any, Rows, Context]:
    """A teacher, its training rows, and a context with a store that two stages share."""
    folder, context = checkpoint("bert"), make_context()
    rows = Rows.prepare(context.data.train.rows, context.preprocessor(folder))
    return load(folder).eval(), rows, replace(context, shared=tmp_path / "run" / "stages")


def test_logits_are_those_of_each_row_alone(known: tuple[Any, Rows, Context], monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, context = known
    monkeypatch.setattr(module, "autocast_dtype", lambda device: None)  # bfloat16 where the processor has it
    found = teacher_logits(model, rows, {"teacher": "a"}, context, "distill")
    assert found.dtype == torch.float32
    with torch.inference_mode():
        for row, logits in enumerate(found):
            assert torch.allclose(logits, forward(model, rows.batch(np.array([row])))[0], atol=1e-5)


def test_equal_rows_are_computed_once(known: tuple[Any, Rows, Context], monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, context = known
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(len(rows.lengths)), np.arange(len(rows.lengths)) % 4))
    texts = [rows.rows[place] for place in order]  # none, one, two or three times
    repeated, ran = Rows.prepare(texts, rows.preprocessor), 0

    def counted(model: torch.nn.Module, features: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal ran
        ran += len(features["input_ids"])
        return forward(model, features)

    monkeypatch.setattr(module, "forward", counted)
    monkeypatch.setattr(module, "dtype_for", lambda *given: None)
    found = teacher_logits(model, repeated, {"teacher": "a"}, context, "distill")
    assert ran == len(set(texts)) < len(texts)
    with torch.inference_mode():
        for row, logits in enumerate(found):
            assert torch.allclose(logits, forward(model, repeated.batch(np.array([row])))[0], atol=1e-5)


def test_another_stage_reads_the_same_bits_and_runs_nothing(known: tuple[Any, Rows, Context], monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, context = known
    first = teacher_logits(model, rows, {"teacher": "a"}, context, "distill")
    monkeypatch.setattr(module, "_computed", None)
    again = teacher_logits(model, rows, {"teacher": "a"}, replace(context, scratch=context.scratch / "other"), "prune")
    assert torch.equal(first, again)


def test_another_teacher_has_a_file_of_its_own(known: tuple[Any, Rows, Context], monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, context = known
    monkeypatch.setattr(module, "autocast_dtype", lambda device: None)
    assert context.shared is not None
    teacher_logits(model, rows, {"teacher": "a"}, context, "distill")
    with torch.no_grad():
        model.classifier.bias += 1.0
    teacher_logits(model, rows, {"teacher": "b"}, context, "distill")
    one, other = (load_file(path)["logits"] for path in sorted(context.shared.glob(f"teacher-*/{FILE}")))
    assert torch.allclose((one - other).abs(), torch.ones_like(one), atol=1e-5)


@pytest.mark.parametrize("place", [0, -1], ids=["header", "numbers"])
def test_a_damaged_file_is_told_and_made_again(place: int, known: tuple[Any, Rows, Context], told: Any) -> None:
    model, rows, context = known
    assert context.shared is not None
    first = teacher_logits(model, rows, {"teacher": "a"}, context, "distill")
    [file] = context.shared.glob(f"teacher-*/{FILE}")
    whole = bytearray(file.read_bytes())
    whole[place] ^= 0x55
    file.write_bytes(bytes(whole))
    assert torch.equal(teacher_logits(model, rows, {"teacher": "a"}, context, "distill"), first)
    assert torch.equal(load_file(file)["logits"], first)
    assert any("damaged, so the teacher runs again" in line for line in told.warnings)


def test_without_a_store_they_lie_in_the_folder_of_the_stage(known: tuple[Any, Rows, Context]) -> None:
    model, rows, context = known
    teacher_logits(model, rows, {"teacher": "a"}, replace(context, shared=None), "distill")
    assert len(list(context.scratch.glob(f"teacher-*/{FILE}"))) == 1
