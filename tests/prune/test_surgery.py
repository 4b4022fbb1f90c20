"""Surgery is exact: the small model answers as the large one does whose other parts are silent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.architecture import blocks
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load, save
from foundation.models.library import with_class
from foundation.training.train import Batch
from prune.proof import prove
from prune.surgery import KeptUnits, head_numbers, indices, shrink
from tests.seldom import seldom

pytestmark = pytest.mark.whole

KINDS = ("bert", "roberta", "distilbert", "gpt2", "vit", "llama", "mixtral")
RELATIVES = ("roberta", "distilbert", "qwen2_moe", "qwen3_moe")
"""Kinds of which another one is shaped alike: the slow tests cut them."""
KEY = "stages.prune"
NORMS = ("LayerNorm", "MixtralRMSNorm", "LlamaRMSNorm", "Qwen2MoeRMSNorm", "Qwen3MoeRMSNorm")
FEW = settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def subsets(draw: st.DrawFn, number: int, least: int = 1) -> tuple[int, ...]:
    return tuple(sorted(draw(st.sets(st.integers(0, number - 1), min_size=min(least, number), max_size=number))))


def silenced(model: Any, structure: Structure, kept: KeptUnits) -> Any:
    """Written out: the large model with zeros where what is gone is read, without the layers that go."""
    large = copy.deepcopy(model)
    with torch.no_grad():
        for block, attention in enumerate(structure.attentions):
            output = large.get_submodule(attention.output).weight  # [D, heads * d]
            for head in range(attention.heads):
                if head // attention.group not in kept.heads[block]:
                    output[:, head * attention.head_dim : (head + 1) * attention.head_dim] = 0
            for name, axis in structure.ffn[block]:
                if name.endswith("weight") and axis == 1:
                    for neuron in range(structure.sizes.ffn[block]):
                        if neuron not in kept.ffn[block]:
                            large.get_parameter(name)[:, neuron] = 0
            router = next((name for name, _ in structure.experts[block] if name.endswith("gate.weight")), None)
            if router is not None:
                gone = torch.tensor([expert not in kept.experts[block] for expert in range(structure.sizes.experts[block])])
                owner = large.get_submodule(router.removesuffix(".gate.weight"))
                owner.gate = OnlySome(owner.gate, gone)
        blocks = large.get_submodule(structure.stacks[0].prefix)
        owner, _, name = structure.stacks[0].prefix.rpartition(".")
        setattr(large.get_submodule(owner), name, nn.ModuleList([blocks[layer] for layer in kept.layers]))
        large.config.num_hidden_layers = len(kept.layers)
    return large


class OnlySome(nn.Module):
    """A router that never sees the experts that are gone."""

    def __init__(self, router: Any, gone_E: Tensor) -> None:
        super().__init__()
        self.router, self.gone_E = router, gone_E

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE = (x.reshape(-1, x.shape[-1]) @ self.router.weight.T).masked_fill(self.gone_E, -torch.inf)
        values, chosen = torch.topk(logits_NE.softmax(dim=-1), self.router.top_k, dim=-1)
        return logits_NE, values / values.sum(dim=-1, keepdim=True), chosen


def equal(small: Any, large: Any, features: dict[str, Tensor]) -> None:
    with torch.no_grad():
        torch.testing.assert_close(small(**features).logits, large(**features).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_it_is_the_model_itself(kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model = make_model(kind)
    structure = Structure.of(model, KEY)
    small: Any = shrink(model, structure, KeptUnits.everything(structure.sizes), KEY)
    assert not hasattr(small.config, "compress_architecture")
    assert all(torch.equal(value, small.state_dict()[name]) for name, value in model.state_dict().items())
    assert small.config.to_dict() == model.config.to_dict()


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", seldom(KINDS, RELATIVES))
@FEW
@given(data=st.data())
def test_the_small_model_is_the_large_one_with_the_rest_silent(
    kind: str, data: st.DataObject, make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model = make_model(kind)
    structure = Structure.of(model, KEY)
    sizes, depth = structure.sizes, structure.depth
    kept = KeptUnits(
        data.draw(subsets(depth)),
        [data.draw(subsets(sizes.key_value_heads[block])) for block in range(depth)],
        [range(24) if kind == "mixtral" else data.draw(subsets(24)) for _ in range(depth)],
        [data.draw(subsets(sizes.experts[block], 2)) if sizes.experts[block] else () for block in range(depth)],
        range(sizes.hidden),
        range(sizes.vocabulary),
    )
    small, features = shrink(model, structure, kept, KEY), make_features(kind)
    equal(small, silenced(model, structure, kept), features)
    assert Structure.of(small, KEY).sizes.same(kept.sizes(sizes))


@pytest.mark.parametrize("kind", seldom([kind for kind in KINDS if kind != "vit"], RELATIVES))
@FEW
@given(vocabulary=subsets(15, 2))
def test_rows_of_the_vocabulary_are_renumbered(
    kind: str, vocabulary: tuple[int, ...], make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model = make_model(kind)
    structure = Structure.of(model, KEY)
    ids = (0, 1, 2, 3, 4, *(5 + number for number in vocabulary))
    kept = KeptUnits(**{**vars(KeptUnits.everything(structure.sizes)), "vocabulary": ids})
    small, features = shrink(model, structure, kept, KEY), make_features(kind, vocabulary=ids[5:])
    renumbered = {**features, "input_ids": torch.tensor([[ids.index(token) for token in row] for row in features["input_ids"].tolist()])}
    with torch.no_grad():
        expected = model(**features).logits
        found = small(**renumbered).logits
    torch.testing.assert_close(found, expected[..., list(ids)] if expected.ndim == 3 else expected, atol=1e-5, rtol=1e-5)


class OverSome(nn.Module):
    """A norm whose mean and variance run over some channels; the others stay 0."""

    def __init__(self, norm: Any, channels: list[int]) -> None:
        super().__init__()
        self.norm, self.channels = norm, channels

    def forward(self, x: Tensor) -> Tensor:
        some, norm = x[..., self.channels], self.norm
        centred = some - some.mean(dim=-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else some
        eps = norm.eps if isinstance(norm, nn.LayerNorm) else norm.variance_epsilon
        normed = centred / (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt() * norm.weight[self.channels]
        y = torch.zeros_like(x)
        y[..., self.channels] = normed + (norm.bias[self.channels] if getattr(norm, "bias", None) is not None else 0)
        return y


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", seldom(KINDS, RELATIVES))
@FEW
@given(data=st.data())
def test_fewer_channels_are_norms_over_those_that_are_left(
    kind: str, data: st.DataObject, make_model: Callable[..., Any], make_features: Callable[..., Any]
) -> None:
    model = make_model(kind)
    structure = Structure.of(model, KEY)
    step = 4 if kind == "mixtral" else 1  # torch multiplies the experts in rows of 16 bytes
    pieces = data.draw(subsets(structure.sizes.hidden // step, 6 // step))  # a norm over two or three blows rounding up
    channels = [piece * step + number for piece in pieces for number in range(step)]
    kept = KeptUnits(**{**vars(KeptUnits.everything(structure.sizes)), "hidden": channels})
    equal(shrink(model, structure, kept, KEY), narrowed(model, structure, channels), make_features(kind))


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_a_pruned_model_is_pruned_again(kind: str, make_model: Callable[..., Any], make_features: Callable[..., Any]) -> None:
    model = make_model(kind)
    first = Structure.of(model, KEY)
    everything = vars(KeptUnits.everything(first.sizes))
    once = shrink(
        model, first, KeptUnits(**{**everything, "layers": (0, 2), "heads": [(0, 2), (0, 1), (1,)], "ffn": [range(7), (3,), (4, 5)]}), KEY
    )
    second = Structure.of(once, KEY)
    assert second.sizes.ffn == (7, 2)
    twice = shrink(
        once, second, KeptUnits(**{**vars(KeptUnits.everything(second.sizes)), "heads": [(1,), (0,)], "ffn": [(2, 6), (1,)]}), KEY
    )
    straight = shrink(
        model, first, KeptUnits(**{**everything, "layers": (0, 2), "heads": [(2,), (0,), (1,)], "ffn": [(2, 6), (3,), (5,)]}), KEY
    )
    equal(twice, straight, make_features(kind))
    assert twice.config.to_dict() == straight.config.to_dict()


def test_grouped_heads_go_with_the_queries_that_share_them() -> None:
    numbers = head_numbers((0, 2), 2, 3)
    assert numbers["key"].tolist() == [0, 1, 2, 6, 7, 8]
    assert numbers["query"].tolist() == [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17]


def test_a_layer_that_makes_three_things_is_cut_in_three_places(make_model: Callable[..., Any]) -> None:
    structure = Structure.of(make_model("gpt2"), KEY)
    kept = KeptUnits(**{**vars(KeptUnits.everything(structure.sizes)), "heads": [(1,), range(4), range(4)]})
    found = indices(structure, kept)
    assert found["transformer.h.0.attn.c_attn.weight", 0].tolist() == [*range(4, 8), *range(20, 24), *range(36, 40)]
    assert found["transformer.h.0.attn.c_proj.weight", 1].tolist() == [4, 5, 6, 7]


EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 20,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
MORE: dict[str, Callable[[], Any]] = {
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**{**EXPERTS, "head_dim": 4}, shared_expert_intermediate_size=12),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**EXPERTS),
    "smollm3": lambda: transformers.SmolLM3Config(
        **{**EXPERTS, "num_hidden_layers": 4, "head_dim": 4}, intermediate_size=24, no_rope_layers=[1, 0, 1, 0]
    ),
}


def drawn(kind: str) -> Any:
    """Returns a model of one of `MORE`."""
    config = with_class(MORE[kind](), "text-generation")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * (0.2 if parameter.ndim > 1 else 0.1))
    model.config.use_cache = False
    return model


def narrowed(model: Any, structure: Structure, channels: list[int]) -> Any:
    """The large model with zeros in the channels that go, and norms over those that stay."""
    large = copy.deepcopy(model)
    gone = [channel for channel in range(structure.sizes.hidden) if channel not in channels]
    with torch.no_grad():
        for name, axis in structure.residual:
            large.get_parameter(name).index_fill_(axis, torch.tensor(gone, dtype=torch.int64), 0)
    for name, module in list(large.named_modules()):
        if type(module).__name__ in NORMS and len(module.weight) == structure.sizes.hidden:  # others are over one head
            owner, _, child = name.rpartition(".")
            setattr(large.get_submodule(owner), child, OverSome(module, channels))
    return large


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", seldom([*(kind for kind in KINDS if kind != "vit"), "qwen2_moe", "qwen3_moe"], RELATIVES))
@FEW
@given(data=st.data())
def test_all_together_is_exact_and_survives_the_disk(
    kind: str,
    data: st.DataObject,
    make_model: Callable[..., Any],
    make_features: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = drawn(kind) if kind in MORE else make_model(kind)
    structure = Structure.of(model, KEY)
    sizes, depth, has_experts = structure.sizes, structure.depth, any(structure.sizes.experts)
    step = 4 if has_experts else 1
    pieces = data.draw(subsets(sizes.hidden // step, 12 // step))
    words = data.draw(subsets(15, 2))
    kept = KeptUnits(
        data.draw(subsets(depth)),
        [data.draw(subsets(sizes.key_value_heads[block])) for block in range(depth)],
        [range(sizes.ffn[block]) if has_experts else data.draw(subsets(sizes.ffn[block])) for block in range(depth)],
        [data.draw(subsets(sizes.experts[block], 2)) if sizes.experts[block] else () for block in range(depth)],
        [piece * step + number for piece in pieces for number in range(step)],
        (0, 1, 2, 3, 4, *(5 + number for number in words)),
    )
    ids = list(kept.vocabulary)
    features = make_features("llama" if kind in MORE else kind, vocabulary=ids[5:])
    renumbered = {**features, "input_ids": torch.tensor([[ids.index(token) for token in row] for row in features["input_ids"].tolist()])}
    folder, source = tmp_path_factory.mktemp(kind), tmp_path_factory.mktemp("nothing")
    save(shrink(model, structure, kept, KEY), source, folder, "cut")
    small, large = load(folder), silenced(narrowed(model, structure, list(kept.hidden)), structure, kept)
    assert Structure.of(small, KEY).sizes.same(kept.sizes(sizes))
    with torch.no_grad():
        expected, found = large(**features).logits, small(**renumbered).logits
    torch.testing.assert_close(found, expected[..., ids] if expected.ndim == 3 else expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", [(1, 2, 3), (0, 3), (2,)], ids=str)
def test_layers_keep_what_the_config_says_of_each(layers: tuple[int, ...], make_features: Callable[..., Any]) -> None:
    model, features = drawn("smollm3"), make_features("llama")
    structure = Structure.of(model, KEY)
    kept = KeptUnits(**{**vars(KeptUnits.everything(structure.sizes)), "layers": layers})
    equal(shrink(model, structure, kept, KEY), silenced(model, structure, kept), features)


def test_a_model_whose_layers_depend_on_their_number_is_refused(make_features: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, features = drawn("smollm3"), make_features("llama")
    structure = Structure.of(model, KEY)
    batch = Batch(features, torch.zeros(3), np.arange(3), 0, 1)
    kept = KeptUnits(**{**vars(KeptUnits.everything(structure.sizes)), "layers": (1, 2, 3)})
    prove(model, structure, kept, batch, KEY)
    monkeypatch.setattr(blocks, "OTHER_LISTS", ("no_rope_layers",))
    with pytest.raises(InputError, match=r"smollm3 without .*layers, heads or neurons gives other"):
        prove(model, structure, kept, batch, KEY)
