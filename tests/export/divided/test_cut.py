"""The cut of one layer: ranks hold the codes, scales and groups of the whole, and together give its output to the bit where it is int8."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from export.divided.cut import cut, cut_group, cut_scales, held_by, nearest, of_experts, refusal
from export.divided.ranks import Meeting
from export.divided.row_linear import RowLinear
from foundation.models.architecture.shapes import on_meta
from foundation.models.architecture.structure import Structure
from foundation.schemes.int4 import Int4Linear, Int4Scales, expand
from tests.export.divided.divided_checkpoints import FAMILIES, GROUP, scales_of
from tests.seldom import seldom

SCHEMES = ("w8a8", "w8a8, smooth", "w8a8-dynamic", "w8a16", "w4a16", "w4a16, zero points", "w4a16, two_level", "w4a16, k_quant", "fp8")
INTEGERS = SCHEMES[:3]
KEY = "export.tensor_parallel"


def naive_share(count: int, rank: int, ranks: int) -> list[int]:
    return [unit for unit in range(count) if unit * ranks // count == rank]


def codes_of(module: nn.Module) -> Tensor:
    codes: Tensor = module.codes() if isinstance(module, Int4Linear) else module.weight  # type: ignore[assignment]
    return codes


def layer_of(outputs: int, inputs: int, seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    layer = nn.Linear(inputs, outputs)
    layer.weight.data[0] *= 100  # one channel that any other's scale would not fit
    return layer


@settings(max_examples=15, deadline=None)
@given(
    scheme=st.sampled_from(SCHEMES),
    ranks=st.sampled_from([1, 2, 3, 4]),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    tokens=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_ranks_of_a_layer_are_the_layer(scheme: str, ranks: int, shape: tuple[int, int], tokens: int, seed: int) -> None:
    outputs, inputs = ranks * shape[0], ranks * GROUP * shape[1]
    layer = layer_of(outputs, inputs, seed)
    scales = scales_of(scheme, layer.weight.detach(), 3.0, 0.5 + torch.rand(inputs))
    layer.weight.data = scales.on_grid(layer.weight.detach())
    whole, x = scales.module("layer", layer), 2 * torch.randn(tokens, inputs)
    for axis in (0, 1):
        meeting, parts, shares = Meeting(ranks), [], []
        for rank in range(ranks):
            share = torch.tensor(naive_share(layer.weight.shape[axis], rank, ranks))
            held = {("layer.weight", axis): share} | ({("layer.bias", 0): share} if axis == 0 else {})
            own = nn.Linear(inputs if axis == 0 else len(share), len(share) if axis == 0 else outputs)
            own.weight.data, own.bias.data = (cut(value, f"layer.{key}", held) for key, value in layer.state_dict().items())
            parts.append(cut_scales(scales, "layer", held).module("layer", own))
            shares.append(share)
        assert torch.equal(torch.cat([codes_of(part).float() for part in parts], axis), codes_of(whole).float())
        with torch.inference_mode():
            expected = whole(x)
        if axis == 0:
            with torch.inference_mode():
                found = [torch.cat([part(x) for part in parts], dim=1)]
        else:
            rows = [RowLinear(part, meeting.of(rank)) for rank, part in enumerate(parts)]
            found = meeting.together([lambda row=row, share=share: row(x[:, share]) for row, share in zip(rows, shares, strict=True)])
        for one in found:
            if scheme in INTEGERS:
                assert torch.equal(one, expected)
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4 * float(layer.weight.detach().abs().max()))


def test_groups_keep_their_scales() -> None:
    """Every weight of a rank has the scale that it has in the whole layer, for outputs and inputs in any order of groups."""
    weight = torch.randn(6, 4 * GROUP)
    scales = scales_of("w4a16, zero points", weight, 1.0)
    assert isinstance(scales, Int4Scales)
    outputs, inputs = torch.tensor([4, 1]), torch.arange(2 * GROUP, 4 * GROUP)
    own = cut_scales(scales, "x", {("x.weight", 0): outputs, ("x.weight", 1): inputs})
    assert torch.equal(own.expanded(2 * GROUP), scales.expanded(4 * GROUP)[outputs][:, inputs])
    assert own.weight_zero_point is not None
    assert scales.weight_zero_point is not None
    zero_OI = expand(scales.weight_zero_point, GROUP, 4 * GROUP)
    assert torch.equal(expand(own.weight_zero_point, GROUP, 2 * GROUP), zero_OI[outputs][:, inputs])


def structure_of(family: str, **changes: int) -> Structure:
    config = FAMILIES[family][0]()
    config.architectures = [FAMILIES[family][1]._model_mapping[type(config)].__name__]
    for name, value in changes.items():
        setattr(config, name, value)
    return Structure.of(on_meta(config), KEY)


@pytest.mark.parametrize("family", seldom(FAMILIES, set(FAMILIES) - {"llama", "modernbert"}))
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_everything_once(family: str, ranks: int) -> None:
    """Of each divided axis every index is held once, but for keys and values that several ranks copy; the order is that of the model."""
    structure = structure_of(family)
    held = [held_by(structure, rank, ranks) for rank in range(ranks)]
    copied = structure.attentions[0].key_value_heads < ranks
    for axis in held[0]:
        together = torch.cat([one[axis] for one in held])
        shapes = {name: value.shape for name, value in on_meta_state(family).items()}
        missing = set(range(shapes[axis[0]][axis[1]])) - set(together.tolist())
        assert not missing, axis
        if not copied:
            assert len(together) == shapes[axis[0]][axis[1]], axis


def on_meta_state(family: str) -> dict[str, Tensor]:
    config = FAMILIES[family][0]()
    config.architectures = [FAMILIES[family][1]._model_mapping[type(config)].__name__]
    return on_meta(config).state_dict()


def test_fewer_heads_of_keys_than_ranks_are_copied() -> None:
    """4 query heads read 2 heads of keys: on 4 ranks the first two hold head 0 of the keys, the others head 1."""
    structure = structure_of("llama")
    attention = structure.attentions[0]
    axis = (f"{attention.parts['key'][0]}.weight", 0)
    heads = [held_by(structure, rank, 4)[axis].tolist() for rank in range(4)]
    assert heads == [list(range(8)), list(range(8)), list(range(8, 16)), list(range(8, 16))]


def test_gate_and_up_of_one_weight_are_both_divided() -> None:
    structure = structure_of("modernbert")
    (axis,) = (axis for axis in structure.ffn[0] if structure.repeated.get(axis) == 2)
    assert held_by(structure, 1, 4)[axis].tolist() == [*range(16, 32), *range(80, 96)]


def test_what_cannot_be_divided_is_told_with_what_can() -> None:
    structure = structure_of("llama", intermediate_size=48)
    assert refusal(structure, 2) is None
    assert refusal(structure, 8) == "block 0 has 4 attention heads"
    assert refusal(structure_of("llama", intermediate_size=42), 4) == "block 0 has 42 FFN neurons"
    three = structure_of("llama", num_attention_heads=6, num_key_value_heads=3, head_dim=8, intermediate_size=48)
    assert refusal(three, 2) == "block 0 has 3 heads of keys and values"
    assert refusal(three, 6) is None
    assert [nearest(n, lambda m: refusal(three, m)) for n in (2, 4, 5, 7, 30)] == [1, 3, 6, 6, 6]
    layers = {"x": Int4Scales(torch.ones(4, 3), 16)}
    assert cut_group(layers, {("x.weight", 1): torch.arange(24)}) == (
        "x would have 24 inputs on each rank, and groups of 16 of them share a scale"
    )
    assert cut_group(layers, {("x.weight", 1): torch.arange(32)}) is None
    assert cut_group(layers, {("x.weight", 0): torch.arange(3)}) is None


def test_axes_of_experts() -> None:
    """Stacked [E, O, I], or [E, I, O] where transposed; a bias is [E, O]."""
    one, two = torch.tensor([1]), torch.tensor([2])
    held = {("up", 1): one, ("up_bias", 1): two, ("q.weight", 0): one}
    assert of_experts(held, {"up": False, "up_bias": False}, {"up": 2, "up_bias": 2}) == {
        ("up.0.weight", 0): one, ("up.1.weight", 0): one, ("up.0.bias", 0): two, ("up.1.bias", 0): two, ("q.weight", 0): one
    }  # fmt: skip
    assert list(of_experts({("down", 1): one}, {"down": True}, {"down": 1})) == [("down.0.weight", 1)]
    assert list(of_experts({("up", 2): one}, {"up": True}, {"up": 1})) == [("up.0.weight", 0)]
