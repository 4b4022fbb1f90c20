"""Learned keys and values: attention written out, what an attention function is handed, and what a prefix leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from foundation.models.layers.prefix import PREFIX, put_prefix, teach
from foundation.schemes import attention_products

KINDS = ("bert", "gpt2", "llama")
WIDTH, HEADS, COUNT, VOCABULARY = 16, 4, 3, 20


def small(kind: str, attention: str = "sdpa") -> Any:
    """A model of two layers with large weights; Llama has two key heads."""
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 24}
    sizes |= {"n_inner": 24} if kind == "gpt2" else {"num_key_value_heads": 2} if kind == "llama" else {}
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCABULARY, pad_token_id=0, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, attn_implementation=attention).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
    return model


def attentions(model: nn.Module) -> dict[str, Any]:
    return dict(attention_products.attention_modules(model))


def with_prefix(model: Any, count: int = COUNT) -> Any:
    """Gives every attention a drawn prefix."""
    heads = getattr(model.config, "num_key_value_heads", HEADS)
    generator = torch.Generator().manual_seed(1)
    for name in attentions(model):
        for learned in put_prefix(model, name, count, heads * WIDTH // HEADS).parameters():
            learned.data.normal_(generator=generator)
    return model


def rows(padding: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    return {name: nn.functional.pad(value, (0, padding)) for name, value in {"input_ids": ids * mask, "attention_mask": mask}.items()}


def states(model: Any, padding: int = 0) -> Tensor:
    """The last states of the tokens of both rows."""
    given = rows(padding)
    with torch.no_grad():
        return model(**given).last_hidden_state[given["attention_mask"].bool()]


def written_out(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **settings: Any) -> tuple[Tensor, None]:
    """Attention query by query with the prefix of the module in front; the mask is True where a token may be read."""
    prefix, causal = module._modules[PREFIX], bool(module.is_causal)
    _, heads, tokens, width = query.shape
    out = torch.zeros(*query.shape[:1], tokens, heads, width)
    for row in range(len(query)):
        for head in range(heads):
            shared = head * key.shape[1] // heads
            columns = slice(shared * width, (shared + 1) * width)
            for token in range(tokens):
                read = [other for other in range(tokens) if not (causal and other > token)]
                if mask is not None:
                    allowed = mask.expand(len(query), heads, tokens, tokens)[row, head, token]
                    read = [other for other in read if allowed[other]]
                keys = torch.cat([prefix.key[:, columns], key[row, shared, read]])
                values = torch.cat([prefix.value[:, columns], value[row, shared, read]])
                scores = keys @ query[row, head, token] * settings["scaling"]
                out[row, token, head] = scores.softmax(dim=0) @ values
    return out, None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "int8"])
def test_every_attention_reads_what_is_written_out(kind: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_prefix(small(kind, "sdpa" if attention == "int8" else attention))
    if attention == "int8":  # no scales: attention in float, by the function of int8
        for name, module in attentions(model).items():
            module.add_module(attention_products.ATTENTION, attention_products.Int8Attention(name, None, None))
        attention_products.use(model)
    found = states(model)
    plain = small(kind)
    before = states(plain)
    with_prefix(plain)
    monkeypatch.setattr(transformers.AttentionInterface, "get_interface", lambda self, name, default: written_out)
    expected = states(plain)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (expected - before).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_without_vectors_a_model_is_as_before(kind: str, attention: str) -> None:
    torch.testing.assert_close(states(with_prefix(small(kind, attention), 0)), states(small(kind, attention)))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_matter(kind: str) -> None:
    model = with_prefix(small(kind))
    torch.testing.assert_close(states(model, padding=5), states(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_row_without_padding_stays_causal(kind: str) -> None:
    model, ids = with_prefix(small(kind)), torch.randint(1, VOCABULARY, (1, 6))
    with torch.no_grad():
        whole, start = (model(input_ids=some).last_hidden_state for some in (ids, ids[:, :4]))
    torch.testing.assert_close(whole[:, :4], start, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tokens_one_by_one_read_it_once(kind: str) -> None:
    model, ids = with_prefix(small(kind)), torch.randint(1, VOCABULARY, (1, 6))
    with torch.no_grad():
        first = model(input_ids=ids[:, :5], use_cache=True)
        last = model(input_ids=ids[:, 5:], past_key_values=first.past_key_values, use_cache=True)
        whole = model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(last.last_hidden_state, whole[:, 5:], rtol=1e-4, atol=1e-5)


def test_the_own_keys_and_values_of_a_row_change_nothing() -> None:
    """Every token is then read twice with equal shares: softmax over a list and over the list twice give the same mean."""
    model, given = small("bert"), rows()
    ids, heard = given["input_ids"][:1], {}
    teach()
    for name, module in attentions(model).items():
        module.key.register_forward_hook(lambda _, __, out, name=name: heard.setdefault((name, "key"), out[0]))
        module.value.register_forward_hook(lambda _, __, out, name=name: heard.setdefault((name, "value"), out[0]))
    with torch.no_grad():
        before = model(input_ids=ids).last_hidden_state
        for name in attentions(model):
            put_prefix(model, name, ids.shape[1], WIDTH).take(heard[name, "key"], heard[name, "value"])
        torch.testing.assert_close(model(input_ids=ids).last_hidden_state, before, rtol=1e-4, atol=1e-5)


def test_the_bias_of_scores_is_for_tokens_alone() -> None:
    registry = transformers.AttentionInterface()
    model = with_prefix(small("bert"))
    module = next(iter(attentions(model).values()))
    tokens = [torch.randn(1, HEADS, 5, WIDTH // HEADS) for _ in range(3)]
    bias = torch.randn(1, HEADS, 5, 5)
    one = registry.get_interface("sdpa", registry["sdpa"])(module, *tokens, bias, scaling=0.5)[0]
    other = registry.get_interface("sdpa", registry["sdpa"])(module, *tokens, None, scaling=0.5, position_bias=bias)[0]
    torch.testing.assert_close(one, other)


def test_a_function_that_does_not_read_it_is_refused() -> None:
    model = with_prefix(small("bert"))
    transformers.AttentionInterface.register("deaf", lambda *args, **kwargs: (args[1].transpose(1, 2), None))
    model.config._attn_implementation = "deaf"
    with pytest.raises(ValueError, match="BertSelfAttention has a learned prefix, which the attention function deaf does not read"):
        states(model)
