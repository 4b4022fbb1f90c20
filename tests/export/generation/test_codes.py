"""Codes of quantized decoders in the graph with a cache: what OpenVINO multiplies equals what torch multiplies in integers."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openvino import opset15 as ops
from torch import nn

from export.generation.cached_graph import cached_graph
from export.generation.codes import insert_codes, int4_weight, rounded
from foundation.models.layers.conv1d import with_linears
from foundation.models.layers.experts import with_separate_experts
from foundation.schemes.int4 import Int4Scales
from foundation.schemes.int4_by_int8 import BlockScales
from foundation.schemes.int8 import ACTIVATION_HIGH, ACTIVATION_LOW, DynamicScales, LayerScales, levels, quantize, weight_bits, weight_scale
from foundation.schemes.int8_weights import WeightScales
from foundation.schemes.scales import Scales
from quantize.group_scales import Groups
from tests.export.generation.tiny_decoders import CONFIGS, VOCABULARY, decoder

pytestmark = pytest.mark.whole

FLOAT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
ZERO_POINTS = "w4a16, zero points"
BLOCKS = "w4a8-block"
OFFSETS = "w4a16, offsets"
SCHEMES = ("w8a8", "w8a8-dynamic", "w8a16", "w4a16", ZERO_POINTS, OFFSETS)
UNEVEN = float(np.float32(0.01012))
"""A scale s for which 128 s * (255 / (127 s + 128 s)) is not 128 in float32."""
QUICK = {*(("llama", scheme) for scheme in SCHEMES), ("gpt2", ZERO_POINTS), *((kind, "w8a8") for kind in ("gpt2", "bloom", "phi3"))}
"""Each scheme of a kind whose weights are not turned, the most different ones where they are; of other kinds other layers have codes,
in the same ways."""
CASES = [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in product(CONFIGS, SCHEMES)]


def quantized(kind: str, scheme: str, group: int = 32) -> tuple[Any, nn.Module, dict[str, Scales]]:
    """Returns a decoder with weights on their grids, the same in integers, and the scales of its blocks' layers."""
    torch.manual_seed(1)
    floating, integer = (with_separate_experts(with_linears(decoder(kind))) for _ in range(2))
    head = floating.get_output_embeddings()
    layers: dict[str, Scales] = {}
    for name, module in list(floating.named_modules()):
        if not isinstance(module, nn.Linear) or module is head:
            continue
        scales = chosen(scheme, module.weight.detach(), group)
        layers[name] = scales
        module.weight.data = scales.on_grid(module.weight.detach())
        parent, _, child = name.rpartition(".")
        setattr(integer.get_submodule(parent), child, scales.module(name, module))
    return floating.eval(), integer.eval(), layers


def chosen(scheme: str, weight_OI: torch.Tensor, group: int = 32) -> Scales:
    """Returns random scales that fit a weight; with int4 some codes are cut off."""
    outputs, inputs = weight_OI.shape
    if scheme.startswith(("w4a16", BLOCKS)):
        scale_OG = 0.01 + 0.05 * torch.rand(outputs, -(-inputs // group))
        if scheme == OFFSETS:
            return Int4Scales.of_grid(Groups(group, symmetric=False, scales="k_quant").grid(weight_OI), group)
        zero_OG = torch.randint(-8, 8, scale_OG.shape, dtype=torch.int8) if scheme == ZERO_POINTS else None
        return (BlockScales if scheme == BLOCKS else Int4Scales)(scale_OG, group, zero_OG)
    if scheme == "w8a16":
        return WeightScales(weight_scale(weight_OI, levels(8)))
    smooth_I = 0.5 + torch.rand(inputs)
    bits = weight_bits("cpu")  # as many as the products of this processor are exact with
    scale_O = weight_scale(weight_OI * smooth_I, levels(bits))
    return LayerScales(scale_O, torch.tensor(0.03), bits, smooth_I) if scheme == "w8a8" else DynamicScales(scale_O, bits, smooth_I)


def logits(graph: openvino.Model, ids: np.ndarray) -> np.ndarray:
    request = openvino.Core().compile_model(graph, "CPU", FLOAT).create_infer_request()
    batch, length = ids.shape
    request.infer(
        {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.tile(np.arange(length), (batch, 1)),
            "beam_idx": np.arange(batch, dtype=np.int32),
        }
    )
    return np.array(request.get_output_tensor(0).data)


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_logits_equal_those_of_the_integers_in_torch(kind: str, scheme: str) -> None:
    floating, integer, layers = quantized(kind, scheme)
    graph = cached_graph(floating)
    insert_codes(graph, layers)
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (2, 9))
    # the engine was told to leave tokens in float, so that of dynamic int8 the weights are compared
    reference = floating if scheme == "w8a8-dynamic" else integer
    with torch.no_grad():
        expected = reference(input_ids=torch.from_numpy(ids)).logits.numpy()
    close = np.abs(logits(graph, ids) - expected).max(axis=(1, 2)) <= 2e-5 * np.abs(expected).max()
    # an activation on a rounding boundary gets the next code where sums are added up in another order: that row parts from there on
    assert close.sum() >= len(ids) - (scheme == "w8a8")


@pytest.mark.first(1)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_openvino_multiplies_are_integers(scheme: str) -> None:
    floating, _, layers = quantized("llama", scheme)
    graph = cached_graph(floating)
    insert_codes(graph, layers)
    compiled = openvino.Core().compile_model(graph, "CPU", FLOAT).get_runtime_model()
    products = [node for node in compiled.get_ops() if str(node.get_rt_info()["layerType"].value) == "FullyConnected"]
    types = [tuple(value.get_element_type().get_type_name() for value in node.input_values()[:2]) for node in products]
    weights = dict.fromkeys(("w8a8-dynamic", "w8a16"), ("f32", "i8"))
    expected = {"w8a8": ("i8", "i8"), **weights, "w4a16": ("f32", "i4"), **dict.fromkeys((ZERO_POINTS, OFFSETS), ("f32", "u4"))}[scheme]
    assert types.count(expected) == len(layers), types
    assert types.count(("f32", "f32")) == 1  # the head


def test_layers_that_read_one_tensor_with_one_scale_share_its_rounding() -> None:
    torch.manual_seed(0)
    floating = with_linears(decoder("llama"))
    same = torch.tensor(0.03)
    layers: dict[str, Scales] = {}
    for name, module in floating.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            step = same if "layers.0" in name else same + 0.01 * len(layers)
            layers[name] = LayerScales(weight_scale(module.weight.detach(), 127), step, 8)
            module.weight.data = layers[name].on_grid(module.weight.detach())
    graph = cached_graph(floating)
    insert_codes(graph, layers)
    rounded = [node for node in graph.get_ops() if node.get_type_name() == "FakeQuantize"]
    assert len(rounded) == 1 + 3  # one for layer 0; the layers of block 1 have scales of their own


def rounded_by_openvino(x: np.ndarray, step: float) -> np.ndarray:
    """Returns the codes of x [n] that an int8 product of OpenVINO reads: it multiplies them by the identity."""
    width = 16
    x_NI = np.pad(x, (0, -len(x) % width)).reshape(-1, width)
    given_x = ops.parameter([-1, width], np.float32)
    identity = ops.multiply(ops.convert(ops.constant(np.eye(width, dtype=np.int8)), np.float32), np.ones((width, 1), np.float32))
    product = ops.matmul(rounded(given_x.output(0), step), identity, False, True)
    compiled = openvino.Core().compile_model(openvino.Model([product], [given_x]), "CPU", FLOAT)
    (layer,) = (node for node in compiled.get_runtime_model().get_ops() if str(node.get_rt_info()["layerType"].value) == "FullyConnected")
    assert [value.get_element_type().get_type_name() for value in layer.input_values()[:2]] == ["i8", "i8"]
    return np.rint(compiled(x_NI)[0] / np.float32(step)).reshape(-1)[: len(x)]


BOUNDARIES = np.arange(ACTIVATION_LOW - 2, ACTIVATION_HIGH + 2) + 0.5


@settings(deadline=None, max_examples=15)
@given(st.floats(2.0**-13, 8, width=32))
@example(UNEVEN)
def test_inputs_are_rounded_as_in_torch_right_beside_a_boundary(step: float) -> None:
    away = 4 * np.finfo(np.float32).eps * np.abs(BOUNDARIES)  # x, 1 / s and their product round by half an eps each
    x = np.concatenate([BOUNDARIES - away, BOUNDARIES + away, np.rint(BOUNDARIES)])
    x = np.asarray(step * x, np.float32)
    expected = quantize(torch.from_numpy(x), torch.tensor(step), ACTIVATION_LOW, ACTIVATION_HIGH)
    np.testing.assert_array_equal(rounded_by_openvino(x, step), expected.numpy())


def test_inputs_on_a_boundary_go_to_the_even_code() -> None:
    step = 0.0625  # a power of two: nothing rounds before the code does
    expected = np.clip(np.rint(BOUNDARIES), ACTIVATION_LOW, ACTIVATION_HIGH)
    np.testing.assert_array_equal(rounded_by_openvino(np.asarray(step * BOUNDARIES, np.float32), step), expected)


@settings(deadline=None, max_examples=15)
@given(
    st.integers(1, 7),
    st.integers(1, 50),
    st.sampled_from([3, 16, 32]),
    st.integers(0, 2**31),
    st.sampled_from(["w4a16", ZERO_POINTS, OFFSETS]),
)
def test_int4_weights_of_any_shape_come_out_as_they_went_in(outputs: int, inputs: int, group: int, seed: int, scheme: str) -> None:
    torch.manual_seed(seed)
    weight_OI = torch.randn(outputs, inputs)
    scales = chosen(scheme, weight_OI, group)
    assert isinstance(scales, Int4Scales)
    codes_OI = scales.codes(weight_OI)
    given_x = ops.parameter([-1, inputs], np.float32)
    model = openvino.Model([ops.matmul(given_x, int4_weight(codes_OI, scales), False, True)], [given_x])
    found = openvino.Core().compile_model(model, "CPU", FLOAT)(np.eye(inputs, dtype=np.float32))[0]
    zero_OG = torch.zeros_like(scales.weight_scale) if scales.weight_zero_point is None else scales.weight_zero_point
    if scales.weight_offset is not None:
        zero_OG = scales.weight_offset / scales.weight_scale - 8
    expected = torch.stack([(codes_OI[:, i].float() - zero_OG[:, i // group]) * scales.weight_scale[:, i // group] for i in range(inputs)])
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6, atol=1e-6)


def test_weights_off_the_grid_are_refused() -> None:
    floating, _, layers = quantized("llama", "w8a8")
    name, scales = next(iter(layers.items()))
    graph = cached_graph(floating)
    with pytest.raises(ValueError, match=f"{name}: weights of the graph are not on the grid"):
        insert_codes(graph, {name: chosen("w8a8", 2 * scales.codes(floating.get_submodule(name).weight).float() + 1)})
    with pytest.raises(ValueError, match="other: no product"):
        insert_codes(graph, {"other": scales})
