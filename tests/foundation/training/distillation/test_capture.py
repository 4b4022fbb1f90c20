from __future__ import annotations

from typing import Any

import pytest
import torch

from foundation.models.architecture.blocks import blocks_of
from foundation.training.distillation.capture import Capture, Wanted
from tests.problems import raises_problem

KINDS = ("bert", "roberta", "distilbert", "gpt2", "vit")
EVERYTHING = Wanted(True, True, frozenset(range(4)))


@pytest.mark.parametrize("kind", KINDS)
def test_scores_give_the_attention_of_the_eager_model(kind: str, make_model: Any, make_features: Any) -> None:
    model, features = make_model(kind), make_features(kind)
    captured = Capture(model, "loss")(features, EVERYTHING)
    eager = make_model(kind)
    eager.set_attn_implementation("eager")
    expected = eager(**features, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(captured.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert captured.mask is not None
    assert sorted(captured.blocks) == [0, 1, 2, 3]
    for block, heads in captured.blocks.items():
        scores = heads.scaling * heads.query @ heads.key.mT
        probabilities = scores.masked_fill(~heads.allowed, -torch.inf).softmax(-1)
        real = captured.mask[:, None, :, None].expand_as(probabilities)  # what padding attends to is nobody's business
        torch.testing.assert_close(probabilities[real], expected.attentions[block][real], atol=1e-4, rtol=1e-3)
    assert len(captured.hidden) == 5
    assert captured.last is not None
    for ours, theirs in zip((*captured.hidden[:-1], captured.last), expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[captured.mask], theirs[captured.mask], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_are_the_outputs_of_the_blocks(kind: str, make_model: Any, make_features: Any) -> None:
    model, features = make_model(kind), make_features(kind)
    expected: list[torch.Tensor] = []

    def note(module: Any, inputs: Any, output: Any) -> None:
        expected.append(output[0] if isinstance(output, tuple) else output)

    hooks = [block.register_forward_hook(note) for block in blocks_of(model, "key").values()]
    stock = model(**features, output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    captured = Capture(model, "loss")(features, Wanted(hidden=True))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(captured.hidden, (stock[0], *expected), strict=True))
    assert captured.last is not None
    assert torch.equal(captured.last, stock[-1])
    assert torch.equal(captured.hidden[-1], captured.last) == (kind != "gpt2")
    if kind == "gpt2":
        assert torch.equal(model.transformer.ln_f(captured.hidden[-1]), captured.last)
    assert not any(block._forward_hooks for blocks in Capture(make_model(kind), "loss").blocks for block in blocks)


def test_layers_that_share_one_block_have_the_states_that_transformers_gives() -> None:
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(vocab_size=20, embedding_size=8, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, intermediate_size=24)
    model, features = AlbertForSequenceClassification(config).eval(), {"input_ids": torch.tensor([[3, 4, 5]])}
    hidden = Capture(model, "loss")(features, Wanted(hidden=True)).hidden
    assert len(hidden) == 5
    for ours, theirs in zip(hidden, model(**features, output_hidden_states=True).hidden_states, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "names"), [("bert", "attention.self.{}"), ("distilbert", "attention.{}_lin"), ("vit", "attention.{}_proj")]
)
def test_heads_are_the_outputs_of_their_layers(kind: str, names: str, make_model: Any, make_features: Any) -> None:
    model, features = make_model(kind), make_features(kind)
    blocks = {"bert": "bert.encoder.layer", "distilbert": "distilbert.transformer.layer", "vit": "vit.layers"}
    seen: dict[str, torch.Tensor] = {}
    for letter, word in (("q", "query"), ("k", "key"), ("v", "value")):
        layer = model.get_submodule(f"{blocks[kind]}.2." + names.format(word if kind == "bert" else letter))
        layer.register_forward_hook(lambda module, inputs, output, word=word: seen.update({word: output}))
    heads = Capture(model, "loss")(features, Wanted(blocks=frozenset({2}))).blocks[2]
    for word, output in seen.items():
        assert torch.equal(getattr(heads, word).transpose(1, 2).flatten(2), output), word


def test_only_what_is_wanted_is_kept(make_model: Any, make_features: Any) -> None:
    capture, features = Capture(make_model("bert"), "loss"), make_features("bert")
    plain = capture(features, Wanted(logits=True))
    assert (plain.hidden, plain.blocks, plain.mask) == ((), {}, None)
    assert capture.model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    assert sorted(capture(features, Wanted(blocks=frozenset({1, 3}))).blocks) == [1, 3]
    after = capture(features, Wanted(logits=True))
    assert after.blocks == {}
    torch.testing.assert_close(after.logits, plain.logits)


def test_two_models_do_not_get_into_each_other(make_model: Any, make_features: Any) -> None:
    features = make_features("bert")
    one, two = (Capture(make_model("bert", num_hidden_layers=layers), "loss") for layers in (4, 2))
    wanted = Wanted(blocks=frozenset({1}))
    first, second = one(features, wanted).blocks[1], two(features, wanted).blocks[1]
    assert not torch.equal(first.query, second.query)
    assert torch.equal(first.query, one(features, wanted).blocks[1].query)


def test_what_was_captured_does_not_change_when_the_model_runs_again(make_model: Any, make_features: Any) -> None:
    model = make_model("bert")
    captured = Capture(model, "loss")(make_features("bert"), Wanted(blocks=frozenset({1})))
    query = captured.blocks[1].query
    model(**make_features("bert", seed=1))
    assert captured.blocks[1].query is query


def test_gradient_flows_through_what_was_captured(make_model: Any, make_features: Any) -> None:
    model = make_model("bert")
    captured = Capture(model, "loss")(make_features("bert"), Wanted(hidden=True, blocks=frozenset({3})))
    (captured.blocks[3].value.sum() + captured.hidden[0].sum()).backward()
    assert model.bert.encoder.layer[3].attention.self.value.weight.grad.abs().sum() > 0
    assert model.bert.embeddings.LayerNorm.bias.grad.abs().sum() > 0
    assert model.bert.encoder.layer[3].intermediate.dense.weight.grad is None


def test_grouped_keys_are_repeated_for_their_queries() -> None:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = LlamaForSequenceClassification(config).eval()
    heads = Capture(model, "loss")({"input_ids": torch.tensor([[3, 4, 5]])}, Wanted(blocks=frozenset({0}))).blocks[0]
    assert heads.query.shape == heads.key.shape == heads.value.shape == (1, 4, 3, 4)
    assert torch.equal(heads.key[:, 0], heads.key[:, 1])
    assert not torch.equal(heads.key[:, 1], heads.key[:, 2])
    assert torch.equal(heads.allowed[0, 0], torch.ones(3, 3, dtype=torch.bool).tril())


def test_attention_that_cannot_be_seen_is_an_error() -> None:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = DebertaV2ForSequenceClassification(DebertaV2Config(**sizes)).eval()
    with raises_problem("stages.distill.loss", "deberta-v2", "layer 1"):
        Capture(model, "stages.distill.loss")({"input_ids": torch.tensor([[3, 4]])}, Wanted(blocks=frozenset({0})))


@pytest.mark.parametrize("kind", KINDS)
def test_masks_say_who_sees_whom(kind: str, make_model: Any, make_features: Any) -> None:
    """No kind adds numbers to its mask: those could not be told from tokens that are hidden."""
    captured = Capture(make_model(kind), "loss")(make_features(kind), EVERYTHING)
    assert all(heads.allowed.dtype == torch.bool and heads.allowed.any(-1).all() for heads in captured.blocks.values())


@pytest.mark.parametrize("bias", [{"use_relative_position_bias": True}, {"use_shared_relative_position_bias": True}])
def test_a_mask_that_holds_a_bias_of_positions_is_an_error(bias: dict[str, bool]) -> None:
    from transformers import BeitConfig, BeitForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    model = BeitForImageClassification(BeitConfig(**sizes, image_size=8, patch_size=4, num_channels=1, **bias)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape))
    with raises_problem("loss", "beit", "layer 2"):
        Capture(model, "loss")({"pixel_values": torch.randn(1, 1, 8, 8)}, Wanted(blocks=frozenset({1})))
