"""Gates on a model: binary ones are surgery, any ones can be folded into the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.models.architecture.structure import Structure
from foundation.models.forward import forward
from foundation.models.library import with_class
from prune.masks.masks import fold, masked
from prune.surgery import KeptUnits, shrink
from tests.seldom import seldom

pytestmark = pytest.mark.whole

KEY = "stages.prune"
DENSE = ("bert", "roberta", "distilbert", "gpt2", "vit", "llama")


def constant(values: list[float]) -> Callable[[bool], torch.Tensor]:
    return lambda training: torch.tensor(values)


def some(number: int, draw: torch.Generator) -> list[int]:
    chosen = [index for index in range(number) if torch.rand((), generator=draw) < 0.6]
    return chosen or [number - 1]


@pytest.mark.parametrize("kind", seldom(DENSE, ("roberta", "distilbert")))
def test_binary_gates_answer_as_the_model_without_what_is_closed(
    kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model, features, draw = make_model(kind), make_features(kind), torch.Generator().manual_seed(7)
    structure = Structure.of(model, KEY)
    sizes = structure.sizes
    everything = KeptUnits.everything(sizes)
    kept = KeptUnits(
        (0, 2),
        [some(count, draw) for count in sizes.key_value_heads],
        [some(count, draw) for count in sizes.ffn],
        everything.experts,
        everything.hidden,
        everything.vocabulary,
    )
    gates: dict[Any, Any] = {(1, "layer"): constant([0.0]), (0, "layer"): constant([1.0])}
    for block in range(structure.depth):
        for what, number in (("heads", sizes.key_value_heads[block]), ("ffn", sizes.ffn[block])):
            gates[block, what] = constant([float(index in getattr(kept, what)[block]) for index in range(number)])
    with torch.inference_mode():
        before = forward(model, features)
        with masked(model, structure, gates):
            found = forward(model, features)
        torch.testing.assert_close(found, forward(shrink(model, structure, kept, KEY), features), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(forward(model, features), before, atol=0, rtol=0)
    assert (found - before).abs().max() > 1e-3


@given(st.sampled_from(("bert", "gpt2", "llama")), st.integers(0, 99))
def test_gates_of_heads_and_neurons_go_into_the_weights(
    make_model: Callable[..., Any], make_features: Callable[..., Any], kind: str, seed: int
) -> None:
    model, features, draw = make_model(kind), make_features(kind), torch.Generator().manual_seed(seed)
    structure = Structure.of(model, KEY)
    gates: dict[Any, Any] = {
        (block, what): constant(torch.rand(count, generator=draw).tolist())
        for block in range(structure.depth)
        for what, count in (("heads", structure.sizes.key_value_heads[block]), ("ffn", structure.sizes.ffn[block]))
    }
    with torch.inference_mode():
        with masked(model, structure, gates):
            expected = forward(model, features)
        fold(model, structure, gates)
        torch.testing.assert_close(forward(model, features), expected, atol=1e-5, rtol=1e-4)


def test_gates_of_channels_scale_the_norms(make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model, features = make_model("bert"), make_features("bert")
    structure = Structure.of(model, KEY)
    values = torch.rand(structure.sizes.hidden)
    with torch.inference_mode():
        with masked(model, structure, {"hidden": lambda training: values}):
            found = forward(model, features)
        for name, module in model.named_modules():
            if name.endswith("LayerNorm"):
                module.weight.mul_(values)
                module.bias.mul_(values)
        torch.testing.assert_close(found, forward(model, features), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@settings(max_examples=10)
@given(st.sampled_from((*DENSE, "gemma")), st.integers(0, 99))
def test_a_folded_model_without_what_is_closed_answers_as_the_masked_one(
    make_model: Callable[..., Any], make_features: Callable[..., Any], kind: str, seed: int
) -> None:
    model = gemma() if kind == "gemma" else make_model(kind)
    features, draw = make_features("llama" if kind == "gemma" else kind), torch.Generator().manual_seed(seed)
    structure = Structure.of(model, KEY)
    sizes = structure.sizes
    kept = replace(
        KeptUnits.everything(sizes),
        heads=[some(count, draw) for count in sizes.key_value_heads],
        ffn=[some(count, draw) for count in sizes.ffn],
    )
    gates: dict[Any, Any] = {"hidden": constant(torch.rand(sizes.hidden, generator=draw).tolist())}
    for block in range(structure.depth):
        for what, number in (("heads", sizes.key_value_heads[block]), ("ffn", sizes.ffn[block])):
            values = torch.rand(number, generator=draw) + 0.1
            gates[block, what] = constant([float(values[unit]) * (unit in getattr(kept, what)[block]) for unit in range(number)])
    with torch.inference_mode():
        with masked(model, structure, gates):
            expected = forward(model, features)
        fold(model, structure, gates)
        found = forward(shrink(model, structure, kept, KEY), features)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def gemma() -> Any:
    """A model whose norms multiply by one more than their weights."""
    shape = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    config = transformers.GemmaConfig(**shape, intermediate_size=24, vocab_size=20, pad_token_id=0, bos_token_id=2, eos_token_id=3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GemmaForCausalLM(with_class(config, "text-generation")).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model
