"""Vectors of texts as hidden states of tokens: what the ONNX and OpenVINO backends of sentence-transformers read, for two formats.

Our graphs answer with vectors v [B, D]: pooling, `dimensions` and the length 1 are inside. sentence-transformers expects hidden states of
tokens and pools them itself, so that the output here is `last_hidden_state` [B, 1, D], one "token" that is the vector, and pooling takes
the first token. `encode` then gives v.

Integer weights with float activations (w8a16, w4a16) need care, because the settings of our session cannot be stored in an ONNX file. A
session with the default settings fuses DequantizeLinear and MatMul or Gemm into MatMulNBits with accuracy level 4, which rounds activations
to int8: 0.5 to 1 % of the largest value of a product. ONNX Runtime 1.31 does so where the axis is written as 0 or 1. Here it is written as
-2 or -1, which means the same and is not fused. The network of OpenVINO has its setting inside.

Left out: the torch backend of sentence-transformers, which weights are for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto, helper

from export.settings_files import copy_settings
from foundation.artifacts.artifact import write_json
from foundation.core.errors import InputError
from foundation.labels.tasks import TASKS
from foundation.models.folder import Checkpoint
from foundation.models.heads.embedding import EMBEDDING_KEY, MODULES, POOLING, PROMPTS, THEIR_NAMES, TRANSFORMER, width_of

if TYPE_CHECKING:
    import openvino

HIDDEN = "last_hidden_state"
"""The output that both backends read."""


def check_embeds(checkpoint: Checkpoint) -> None:
    """Raises if sentence-transformers cannot read the settings of a checkpoint.

    Raises:
        InputError: The checkpoint is of another task, or has a shape of its own.
    """
    if not getattr(checkpoint.config, EMBEDDING_KEY, None):
        tasks = [task for task, row in TASKS.items() if row.embeds_texts]
        raise InputError(
            f"{checkpoint.folder}", "no model whose answers are vectors of texts", remedy=f"give a checkpoint of {' or '.join(tasks)}"
        )
    missing = [name for name in (MODULES, TRANSFORMER, PROMPTS) if not (checkpoint.folder / name).is_file()]
    if missing:
        stock = "its layers differ in size, and sentence-transformers asks for a stock config"
        raise InputError(f"{checkpoint.folder}", f"no {missing[0]}", f"{stock}")


def write_settings(checkpoint: Checkpoint, out: Path) -> None:
    """Writes config, tokenizer and prompts of a checkpoint, and the modules Transformer and Pooling with the mode cls, to a folder."""
    copy_settings(checkpoint.folder, out)
    modules = [("", "Transformer"), (POOLING, "Pooling")]
    write_json(
        out / MODULES,
        [
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for place, (path, kind) in enumerate(modules)
        ],
    )
    (out / POOLING).mkdir()
    modes = {key: pooling == "cls" for pooling, (_, key) in THEIR_NAMES.items()}  # the mean is taken too where its key is missing
    write_json(out / POOLING / "config.json", {"word_embedding_dimension": width_of(checkpoint.config), **modes})


def as_hidden_states(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a graph whose output `logits` [B, D] became `last_hidden_state` [B, 1, D]; the model is changed."""
    graph, (output,) = model.graph, model.graph.output
    batch, width = output.type.tensor_type.shape.dim
    graph.initializer.append(helper.make_tensor("hidden_states_axes", TensorProto.INT64, [1], [1]))
    graph.node.append(helper.make_node("Unsqueeze", [output.name, "hidden_states_axes"], [HIDDEN], name=HIDDEN))
    shape = [batch.dim_param or batch.dim_value, 1, width.dim_param or width.dim_value]
    made = helper.make_tensor_value_info(HIDDEN, output.type.tensor_type.elem_type, shape)
    del graph.output[:]
    graph.output.append(made)
    return model


def with_float_activations(model: onnx.ModelProto) -> onnx.ModelProto:
    """Lets a session with default settings multiply integer weights with float activations, in place; other weights stay as they are.

    Returns:
        `model`, in which the axis of such a weight's DequantizeLinear counts from the end.
    """
    dimensions = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
    dequantized = {node.output[0]: node for node in model.graph.node if node.op_type == "DequantizeLinear"}
    for product in model.graph.node:
        if product.op_type not in ("MatMul", "Gemm") or product.input[0] in dequantized:
            continue
        node = dequantized.get(product.input[1])
        if node is None or node.input[0] not in dimensions:
            continue
        for attribute in node.attribute:
            if attribute.name == "axis" and attribute.i >= 0:
                attribute.i -= dimensions[node.input[0]]
    return model


def write_network(network: Path, file: Path) -> None:
    """Writes a network of OpenVINO with the output `last_hidden_state`, and its weights; the folder of `file` is made."""
    import numpy as np
    import openvino
    from openvino import opset13

    model = openvino.Core().read_model(network)
    vectors = model.get_results()[0].input_value(0)
    hidden = opset13.unsqueeze(vectors, opset13.constant(np.array([1], np.int64)))
    hidden.output(0).set_names({HIDDEN})
    changed = with_results(model, [opset13.result(hidden)])
    file.parent.mkdir(parents=True, exist_ok=True)
    openvino.save_model(changed, file, compress_to_fp16=False)


def with_results(model: openvino.Model, results: list[openvino.Node]) -> openvino.Model:
    """Returns a network with other results, and with the properties that it is compiled with wherever it is read."""
    import openvino

    changed = openvino.Model(results, model.get_parameters(), model.get_friendly_name())
    for name, value in model.get_rt_info().items():
        if name == "runtime_options":
            changed.set_rt_info(value, [name])
    return changed
