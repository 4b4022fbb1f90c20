"""Tokens that leave a model: against a forward pass written out row by row, without padding and without hooks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foundation.core.errors import InputError
from foundation.models.architecture.blocks import blocks_of, with_layers
from foundation.models.architecture.dropped_tokens import are_tokens, most_significant, staying
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load
from foundation.models.own_shape import SHAPE_KEY
from prune.tokens.tokens import with_tokens

KEY = "stages.prune"
VOCABULARY = 60
LENGTHS = (11, 6, 2, 1)
SIZES = {"num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "num_labels": 3}


def large(model: Any) -> Any:
    """Returns the model with weights that make tokens differ, in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def bert(attention: str = "sdpa") -> Any:
    config = transformers.BertConfig(**SIZES, vocab_size=VOCABULARY, max_position_embeddings=40, attn_implementation=attention)
    return large(transformers.BertForSequenceClassification(config))


def vit() -> Any:
    config = transformers.ViTConfig(**SIZES, image_size=20, patch_size=4, architectures=["ViTForImageClassification"])
    return large(transformers.ViTForImageClassification(config))


def rows(lengths: Sequence[int] = LENGTHS, beyond: int = 0) -> dict[str, Tensor]:
    """Returns rows of these lengths, padded to the longest one and `beyond`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(len(lengths), max(lengths) + beyond, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(4, VOCABULARY, (length,), generator=generator)
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask}


WEIGHTS = [torch.randn(16, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def dropping(model: Any, shares: Sequence[float]) -> Any:
    return with_tokens(model, shares, WEIGHTS, KEY)


def written_out(model: Any, states_LD: Tensor, shares: Sequence[float]) -> Tensor:
    """Returns the last states of the first token of one row."""
    incoming = len(states_LD)
    for number, block in enumerate(blocks_of(model, KEY).values()):
        scores = [float(sum(a * b for a, b in zip(state_D, WEIGHTS[number], strict=True))) for state_D in states_LD]
        output = block(states_LD[None])
        states_LD = (output[0] if isinstance(output, tuple) else output)[0]
        if number < len(shares) - 1:
            whole = round(1000 * shares[number]) * incoming
            others = whole // 1000 + (whole % 1000 > 0) - 1
            kept = [0, *sorted(range(1, len(states_LD)), key=lambda token, scores=scores: -scores[token])[:others]]
            states_LD = states_LD[kept]
    return states_LD[0]


@pytest.mark.parametrize("shares", [(0.5, 0.25, 0.1, 0.1), (1.0, 0.4, 0.4, 0.4), (0.001, 0.001, 0.001, 0.001), (0.9, 0.3, 0.2, 0.01)])
def test_a_text_has_the_states_of_the_pass_written_out(shares: tuple[float, ...]) -> None:
    plain = bert()
    model = dropping(bert(), shares)
    with torch.no_grad():
        given = model(**rows(), output_hidden_states=False).logits
        for row, length in enumerate(LENGTHS):
            ids = rows()["input_ids"][row : row + 1, :length]
            first_D = written_out(plain, plain.bert.embeddings(ids)[0], shares)
            expected = plain.classifier(torch.tanh(plain.bert.pooler.dense(first_D)))
            torch.testing.assert_close(given[row], expected, atol=1e-5, rtol=1e-4)


def test_an_image_has_the_states_of_the_pass_written_out() -> None:
    plain, shares = vit(), (0.5, 0.3, 0.2, 0.2)
    pixels = torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        given = dropping(plain, shares)(pixel_values=pixels).logits
        for row, states_LD in enumerate(plain.vit.embeddings(pixels)):
            first_D = written_out(plain, states_LD, shares)
            torch.testing.assert_close(given[row], plain.classifier(plain.vit.layernorm(first_D)), atol=1e-5, rtol=1e-4)


@pytest.mark.whole
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(0, 9),
    st.lists(st.floats(0.001, 1), min_size=4, max_size=4),
    st.sampled_from(("sdpa", "eager")),
)
def test_padding_changes_nothing(lengths: list[int], beyond: int, shares: list[float], attention: str) -> None:
    model = dropping(bert(attention), sorted(shares, reverse=True))
    with torch.no_grad():
        short, long = (model(**rows(lengths, more)).logits for more in (0, beyond))
    torch.testing.assert_close(long, short, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["additive", "bool", "two axes"])
def test_a_mask_may_have_any_form(form: str) -> None:
    model = dropping(bert(), (0.5, 0.3, 0.2, 0.2))
    features = rows()
    plain = model(**features).logits
    valid_B11L = features["attention_mask"][:, None, None].bool()
    masks = {
        "additive": torch.where(valid_B11L, 0.0, -30000.0),
        "bool": valid_B11L.expand(-1, -1, 11, -1),
        "two axes": features["attention_mask"],
    }
    torch.testing.assert_close(model(input_ids=features["input_ids"], attention_mask=masks[form]).logits, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [bert, vit])
def test_copies_do_not_share_what_they_see(make: Any) -> None:
    model = dropping(make(), (0.5, 0.3, 0.2, 0.2))
    copied = copy.deepcopy(model)
    features = rows() if make is bert else {"pixel_values": torch.randn(2, 3, 20, 20)}
    with torch.no_grad():
        expected = model(**features).logits
        for parameter in model.parameters():
            parameter.zero_()
        model(**features)
        torch.testing.assert_close(copied(**features).logits, expected)


def test_gradients_reach_what_stays_and_the_embeddings() -> None:
    model = dropping(bert(), (0.5, 0.3, 0.2, 0.2)).train()
    model(**rows()).logits.sum().backward()
    assert all(parameter.grad is None or bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
    assert all(bool(block.get_parameter("output.dense.weight").grad.any()) for block in blocks_of(model, KEY).values())


@pytest.mark.whole
def test_a_checkpoint_keeps_its_shares(tmp_path: Path) -> None:
    from foundation.models.checkpoint import save

    plain = bert()
    plain.save_pretrained(tmp_path / "plain")
    model = dropping(plain, (0.5, 0.3, 0.2, 0.2))
    (tmp_path / "saved").mkdir()
    save(model, tmp_path / "plain", tmp_path / "saved", "test")
    loaded: Any = load(tmp_path / "saved")
    torch.testing.assert_close(loaded(**rows()).logits, model(**rows()).logits)
    assert Structure.of(loaded, KEY).sizes.tokens == (0.5, 0.3, 0.2, 0.2)
    with pytest.raises(ValueError, match=r"compress\.api\.load_checkpoint"):  # Transformers alone would keep all tokens
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert getattr(with_layers(loaded.config, (0, 2, 3)), SHAPE_KEY)["tokens"] == [0.5, 0.2, 0.2]
    back = with_tokens(loaded, (), (), KEY)
    torch.testing.assert_close(back(**rows()).logits, plain(**rows()).logits)


def test_a_damaged_share_is_one_line(tmp_path: Path) -> None:
    from foundation.models.checkpoint import save

    plain = bert()
    plain.save_pretrained(tmp_path / "plain")
    (tmp_path / "saved").mkdir()
    save(dropping(plain, (0.5, 0.3, 0.2, 0.2)), tmp_path / "plain", tmp_path / "saved", "test")
    config = tmp_path / "saved" / "config.json"
    for wrong, told in (("[]", "lists of 4 entries"), ("[0.5]", "lists of 4 entries"), ("[0.5, 0.4, 0.3, 2]", r"tokens\.3")):
        text = config.read_text()
        start = text.index('"tokens": [') + len('"tokens": ')
        config.write_text(text[:start] + wrong + text[text.index("]", start) + 1 :])
        if wrong == "[]":
            continue  # no shares: all tokens stay
        with pytest.raises(InputError, match=told):
            load(tmp_path / "saved")
        config.write_text(text)


@given(st.integers(1, 3000), st.floats(0.001, 1))
def test_as_many_stay_as_their_share_rounded_up(tokens: int, share: float) -> None:
    exact = round(1000 * share) * tokens
    expected = exact // 1000 + (exact % 1000 > 0)
    assert 1 <= staying(tokens, share) == expected <= tokens
    assert int(are_tokens(torch.tensor([[tokens]]), share, 3000).sum()) == expected


def test_the_first_token_stays_the_first() -> None:
    scores = torch.tensor([[0.0, 0.3, 0.1, 0.5], [0.9, 0.1, 0.2, -30000.0]])
    assert most_significant(scores, 3).tolist() == [[0, 3, 1], [0, 2, 1]]
