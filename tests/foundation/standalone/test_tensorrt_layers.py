"""What TensorRT says of its layers, from its log and its inspector: python -m pytest tests/foundation/standalone/test_tensorrt_layers.py"""

import json
from pathlib import Path

import pytest

from export.engines import tensorrt
from export.graph.macs import Gemm
from foundation.standalone.tensorrt_layers import (
    Layer,
    fused_attentions,
    gemm_precisions,
    inspected_layers,
    kernel_precision,
    listed_layers,
    with_products,
)

LOG = (
    "Layers:\n"
    "Name: a/MatMul+b/MatMul_myl0_2, LayerType: gemm, Inputs: [ { Name: x, Dimensions: [-1,8], Datatype: Int8, Format: (Linear) Row }], "
    "Constants: [ { Name: w, Dimensions: [8,16], Datatype: Int8, Format: (Linear) Row }, { Name: alpha, Dimensions: [1], Datatype: Float, "
    "Format: (Linear) Row }], Outputs: [ { Name: y, Dimensions: [-1,16], Datatype: Float, Format: (Linear) Row }], TacticName: stub, "
    "StreamId: 0, Metadata: [ONNX Layer: a/MatMul][ONNX Layer: b/MatMul]\n"
    "Name: __myl_Mul, LayerType: kgen, Inputs: [ { Name: y, Dimensions: [-1,16], Datatype: Float, Format: (Linear) Row }], Constants: [], "
    "Outputs: [ { Name: z, Dimensions: [-1,16], Datatype: Float, Format: (Linear) Row }], TacticName: , "
    "StreamId: 0, Metadata: [ONNX Layer: a/MatMul]\n"
    "Name: c, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], TacticName: , StreamId: 0, Metadata: \n"
)


def test_layers_are_read_from_the_log():
    first, second, third = listed_layers(LOG)
    assert first == Layer("a/MatMul+b/MatMul_myl0_2", "gemm", ("int8",), ("int8", "float"), ("a/MatMul", "b/MatMul"), "stub")
    assert second.nodes == ("a/MatMul",)
    assert third.inputs == third.nodes == ()
    assert gemm_precisions([first, second, third], ["a/MatMul", "b/MatMul", "c/MatMul"]) == {"a/MatMul": "int8", "b/MatMul": "int8"}


@pytest.mark.parametrize(
    ("inputs", "constants", "expected"),
    [
        (("int8",), ("int8", "float"), {"g": "int8"}),
        (("int8", "int8"), (), {"g": "int8"}),
        (("float",), ("int8", "float"), {"g": "fp32"}),  # weights alone in int8: a float GEMM
        (("int8", "half"), ("half",), {"g": "fp16"}),
        (("int8",), ("float",), {}),
    ],
)
def test_a_gemm_is_int8_where_both_operands_are(inputs, constants, expected):
    assert gemm_precisions([Layer("n", "gemm", inputs, constants, ("g",), "")], ["g"]) == expected


def test_a_gemm_split_into_int8_and_float_layers_is_float():
    layers = [Layer("n", "gemm", ("int8",), ("int8",), ("g",), ""), Layer("m", "fusion", ("float",), ("float",), ("g",), "")]
    assert gemm_precisions(layers, ["g"]) == {"g": "fp32"}


WHOLE = Layer("_gemm_mha_v2_myl0_7", "kgen", ("half",), (), ("a/attention", "b/attention.2"), "")


def test_an_attention_node_stands_for_both_of_its_products():
    (layer,) = with_products([WHOLE])
    assert layer.nodes == ("a/qk", "a/pv", "b/qk.2", "b/pv.2")
    others = Layer("n", "gemm", (), (), ("h.attention.self.query/MatMul", "a/attention_weights"), "")
    assert with_products([others]) == (others,)


def test_an_attention_is_fused_where_one_layer_runs_its_product():
    apart = Layer("__fc29523_myl0_8", "gemm", ("float",), (), ("c/attention",), "")
    layers = with_products([WHOLE, apart])
    assert fused_attentions(layers, ["a/pv", "b/pv.2", "c/pv"]) == 2


def test_the_layer_of_a_fused_attention_tells_the_type_of_its_products():
    moved = Layer("__myl_MulCastAdd_myl1_16", "kgen", ("float",), ("half",), ("a/attention",), "")
    assert gemm_precisions(with_products([moved, WHOLE]), ["a/qk", "a/pv"]) == {"a/qk": "fp16", "a/pv": "fp16"}


RECORDED = json.loads(Path(__file__).with_name("inspector_recorded.json").read_text(encoding="utf-8"))
IO_TENSORS = {  # https://docs.nvidia.com/deeplearning/tensorrt/11.0.0/api/migration/tensorrt-10x-to-11x-IEngineInspector.html
    "I/O Tensors": [
        {
            "Name": "input_0",
            "IOMode": "Input",
            "DataType": "Float",
            "Dimensions": [1, 3, 224, 224],
            "Location": "Device",
            "IsShapeInferenceIO": False,
        }
    ]
}


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded["source"].split(",")[0])
@pytest.mark.parametrize("around", [{"Bindings": ["input_0", "output_0"]}, IO_TENSORS], ids=["10", "11"])
def test_recorded_inspector_json_is_read(recorded, around):
    layers = inspected_layers(json.dumps({"Layers": [recorded["layer"]], **around}))
    assert [list(layer.inputs) for layer in layers] == ([recorded["inputs"]] if recorded["inputs"] else [])
    assert gemm_precisions(layers, ["g"]) == ({"g": recorded["precision"]} if recorded["precision"] else {})


@pytest.mark.parametrize("key", ["Datatype", "DataType"])
def test_types_in_a_field_of_their_own_are_read(key):
    """TensorRT 11 parts format and type; the log of TensorRT-RTX, which is of that interface, writes "Datatype: Int8"."""
    tensor = {key: "Int8", "Format": "Row major linear"}
    layer = {"Name": "n", "LayerType": "gemm", "Inputs": [tensor], "Constants": [tensor], "Metadata": "[ONNX Layer: g]"}
    assert gemm_precisions(inspected_layers(json.dumps({"Layers": [layer]})), ["g"]) == {"g": "int8"}


@pytest.mark.parametrize(
    ("metadata", "nodes"),
    [
        ("[ONNX Layer: /a/MatMul][ONNX Layer: /a/Add]", ("/a/MatMul", "/a/Add")),  # issue 4397 of NVIDIA/TensorRT
        ("[ONNX Layer: a]\x1e[ONNX Layer: b]\x1f[ONNX Layer: c]", ("a", "b", "c")),
        # processMetadata in importerUtils.cpp of onnx-tensorrt: "[ONNX Layer: <name> | property1 | property2 ...]"
        ("[ONNX Layer: a | outer (block) | whole (model)][ONNX Layer: b]", ("a", "b")),
        ("", ()),
    ],
)
def test_nodes_are_read_from_metadata(metadata, nodes):
    [layer] = inspected_layers(json.dumps({"Layers": [{"Name": "n", "Metadata": metadata}]}))
    assert layer.nodes == nodes


# Lines of TensorRT 10 on an A10, as reported in https://github.com/NVIDIA/TensorRT/issues/4397: no constants, "Format/Datatype".
REPORTED = (
    "Name: /encoder/layers_10/pos_ff/output/MatMul_myl0_77, LayerType: gemm, Inputs: [ { Name: a, Dimensions: [1,40,1024], "
    "Format/Datatype: Half }], Outputs: [ { Name: b, Dimensions: [1,40,256], Format/Datatype: Half }], TacticName: "
    "sm80_xmma_gemm_f16f16_f16f16_f16_nn_n_tilesize32x32x64_stage6_warpsize2x2x1_tensor16x8x16, StreamId: 0, Metadata: "
    "[ONNX Layer: /encoder/layers.10/pos_ff/output/MatMul][ONNX Layer: /encoder/layers.10/pos_ff/output/Add]\n"
)


def test_layers_of_tensorrt_10_are_read_from_its_log():
    (layer,) = listed_layers(REPORTED)
    assert (layer.kind, layer.inputs, layer.constants) == ("gemm", ("half",), ())
    assert gemm_precisions([layer], ["/encoder/layers.10/pos_ff/output/MatMul"]) == {"/encoder/layers.10/pos_ff/output/MatMul": "fp16"}


@pytest.mark.parametrize(
    ("tactic", "expected"),
    [
        # names of kernels of NVIDIA's libraries, as public logs and tools list them
        ("sm80_xmma_gemm_i8i8_i8i32_f32_tn_n_tilesize256x128x64_stage4_warpsize4x2x1_tensor16x8x32", "int8"),
        ("sm80_xmma_gemm_i8f32_i8i32_f32_tn_n_tilesize64x64x64_stage4_warpsize2x2x1_tensor16x8x32", "int8"),
        ("sm80_xmma_fprop_implicit_gemm_interleaved_i8f32_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32_nchw_tilesize64x32x64_stage6", "int8"),
        ("sm80_xmma_gemm_f16f16_f16f16_f16_nt_n_tilesize128x256x32_stage3_warpsize2x4x1_tensor16x8x16", "fp16"),
        ("sm80_xmma_sparse_gemm_f16f16_f16f32_f32_nt_n_tilesize128x128x64_stage3_warpsize2x2x1_sptensor16x8x32", "fp16"),
        ("sm80_xmma_gemm_tf32tf32_tf32f32_f32_nt_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8", "tf32"),
        ("ampere_sgemm_128x64_tn", "fp32"),
        ("turing_h1688gemm_128x128_ldg8_tn", "fp16"),
        ("__myelin_CASK_STUB", None),
        ("", None),
    ],
)
def test_the_name_of_a_kernel_tells_what_it_multiplies(tactic, expected):
    assert kernel_precision(tactic) == expected


INT8_KERNEL = "sm80_xmma_gemm_i8f32_i8i32_f32_tn_n_tilesize64x64x64"
UNBOUND = {"Name": "x", "Location": "Device", "Dimensions": [-1, 128], "Format/Datatype": "N/A due to dynamic shapes"}
"""A tensor as the inspector of TensorRT 8.6 to 10 gives it for an engine with dynamic shapes, in many public logs."""


@pytest.mark.parametrize(
    ("tensor", "tactic", "expected"),
    [
        (UNBOUND, INT8_KERNEL, {"g": "int8"}),
        (UNBOUND, "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n", {"g": "fp16"}),
        (UNBOUND, "__myelin_CASK_STUB", {}),  # nothing is known: the share is null, with a reason
        ({**UNBOUND, "Format/Datatype": "Int8"}, INT8_KERNEL, {"g": "int8"}),  # weights are not listed there
        ({**UNBOUND, "Format/Datatype": "Int8"}, "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n", {"g": "fp16"}),  # codes that are dequantized
        ({**UNBOUND, "Format/Datatype": "Half(64,1:8,...)"}, "", {"g": "fp16"}),
    ],
)
def test_types_that_the_inspector_does_not_tell_are_read_off_the_kernel(tensor, tactic, expected):
    layer = {"Name": "n", "LayerType": "gemm", "Inputs": [tensor], "TacticName": tactic, "Metadata": "[ONNX Layer: g]"}
    layers = inspected_layers(json.dumps({"Layers": [layer]}))
    assert gemm_precisions(layers, ["g"]) == expected
    told = tensorrt.share([Gemm("g", "weight", 10, "g")], gemm_precisions(layers, ["g"]))
    assert told.int8_share == ({"int8": 1.0, "fp16": 0.0}[expected["g"]] if expected else None)
    assert (told.int8_share_reason is None) == bool(expected)
