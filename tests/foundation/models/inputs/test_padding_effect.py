"""Padding behind a text: models whose answers depend on it are told of when they are imported, and others have no effect of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig

from foundation.models.forward import forward
from foundation.models.inputs.padding_effect import SEEN, padding_effect
from tests.architectures.steps import drawn
from tests.architectures.table import ENCODER_DECODERS, ENCODERS

TEXTS = {name: one for name, one in {**ENCODERS, **ENCODER_DECODERS}.items() if one.task == "text-classification"}
SEES = {"canine", "convbert", "fnet", "funnel", "nystromformer", "xlnet", "yoso"}
"""Models that see padding, in Transformers 5.23."""
FEW = ("bert", "roberta", "convbert", "bart", "xlnet", "yoso")


def effect(name: str) -> float:
    model = drawn(TEXTS[name])
    return padding_effect(model.config, partial(forward, model))


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in TEXTS])
def test_models_that_see_padding(name: str) -> None:
    assert (effect(name) > SEEN) == (name in SEES)


def config() -> BertConfig:
    return BertConfig(vocab_size=5, pad_token_id=1, eos_token_id=2, max_position_embeddings=16)


def answered(weight: float, seen: list[dict[str, Tensor]]) -> Any:
    """A model that adds up the ids of its tokens; it sees the padded ones by a weight."""

    def answer(features: dict[str, Tensor]) -> Tensor:
        seen.append(features)
        ids, mask = features["input_ids"].double(), features["attention_mask"]
        return (ids * mask + weight * (1 - mask)).sum(dim=1, keepdim=True).float()

    return answer


def test_the_effect_is_the_largest_change_of_an_answer() -> None:
    seen: list[dict[str, Tensor]] = []
    assert padding_effect(config(), answered(0.0, seen)) == 0.0
    found = padding_effect(config(), answered(2.0, seen))
    alone = [one for one in seen if bool(one["attention_mask"].all())][-2:]
    expected = max(2.0 * count / float(one["input_ids"].sum()) for one, count in zip(alone, (8, 1), strict=True))
    assert found == pytest.approx(expected, rel=1e-5)


def test_rows_have_one_end_no_padding_inside_and_fit_the_model() -> None:
    seen: list[dict[str, Tensor]] = []
    padding_effect(config(), answered(0.0, seen))
    for one in seen:
        (ids,), (mask,) = one["input_ids"], one["attention_mask"]
        assert len(ids) <= 16
        text = ids[mask == 1]
        assert int(text[-1]) == 2
        assert int((text == 2).sum()) == 1
        assert not bool((text == 1).any())
        assert bool((ids[mask == 0] == 1).all())
    assert {int(one["input_ids"].shape[1]) for one in seen} == {7, 8, 11, 12, 15}
    assert torch.equal(seen[0]["input_ids"], seen[1]["input_ids"][:, :7])
