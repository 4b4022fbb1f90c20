"""Models that answer with vectors: the codes of every layer are torch's, vectors are pooled from packed rows, and the parts are proved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from export.fused import parts
from export.fused.parts import plan_of
from export.fused.plan import read_plan, write_plan
from foundation.core.errors import InputError
from foundation.models.folder import Checkpoint
from foundation.models.heads.embedding import EMBEDDING_KEY
from tests.export.fused import encoders
from tests.export.fused.encoders import Answers, Shape, Ways
from tests.export.fused.test_forward import compare_codes

Interpreted = Callable[..., Any]
SHAPES = {
    "mean": Shape(vectors={}),
    "first token, its first numbers": Shape("distilbert", vectors={"pooling": "cls", "dimensions": 24}),
    "last token": Shape("roberta", vectors={"pooling": "last", "normalize": False}),
    "weighted mean": Shape("mpnet", vectors={"pooling": "weighted", "dimensions": 40, "normalize": False}),
}
HEADS = {
    "mean": ("mean", None, True),
    "first token, its first numbers": ("first", 24, True),
    "last token": ("last", None, False),
    "weighted mean": ("weighted", 40, False),
}


@pytest.mark.first(1)
@pytest.mark.whole
@pytest.mark.parametrize("name", SHAPES)
def test_codes_and_vectors_are_torchs(name: str, interpreted: Interpreted, tmp_path: Path) -> None:
    given = encoders.features(3, kinds=SHAPES[name].family == "bert")
    folder = encoders.checkpoint(tmp_path, SHAPES[name])
    vectors, read = encoders.in_torch(folder, given)
    answers: Answers = interpreted(encoders.in_kernels, folder, given)
    same = compare_codes(read, answers, given["attention_mask"].sum(axis=1).tolist())
    assert sum(same) >= 2
    torch.testing.assert_close(answers.logits[same], vectors[same], rtol=1e-4, atol=1e-4)
    if HEADS[name][2]:
        torch.testing.assert_close(answers.logits.norm(dim=1), torch.ones(3))


@pytest.mark.slow
@pytest.mark.whole
def test_a_vector_has_the_same_bits_whatever_is_packed_beside_its_row(interpreted: Interpreted, tmp_path: Path) -> None:
    folder = encoders.checkpoint(tmp_path, Shape(vectors={}, config={"num_hidden_layers": 1}))
    ways: Ways = interpreted(encoders.in_ways, folder, encoders.features(2))
    for found in (ways.padded, ways.filled, ways.alone):
        assert torch.equal(found, ways.packed)
    assert torch.equal(ways.padded_logits, ways.logits)
    assert torch.equal(ways.recorded_logits, ways.logits)


@pytest.mark.parametrize("name", SHAPES)
def test_the_head_of_a_plan_is_the_one_of_the_settings(name: str, tmp_path: Path) -> None:
    plan = plan_of(Checkpoint(encoders.checkpoint(tmp_path, SHAPES[name])))
    write_plan(plan, tmp_path / "plan")
    for found in (plan, read_plan(tmp_path / "plan")):
        assert found.head.layers == ()
        assert (found.head.pooling, found.head.dimensions, found.head.normalize) == HEADS[name]


@pytest.mark.parametrize("other", [{"pooling": "cls"}, {"pooling": "weighted"}, {"normalize": False}, {"dimensions": 63}])
def test_a_head_that_the_model_does_not_have_is_refused(other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, head = encoders.checkpoint(tmp_path, Shape(vectors={})), parts._head

    def mistaken(model: Any, blocks: Any) -> Any:
        usual = getattr(model.config, EMBEDDING_KEY)
        setattr(model.config, EMBEDDING_KEY, {**usual, **other})
        found = head(model, blocks)
        setattr(model.config, EMBEDDING_KEY, usual)
        return found

    monkeypatch.setattr(parts, "_head", mistaken)
    with pytest.raises(InputError, match="computes otherwise"):
        plan_of(Checkpoint(folder))
