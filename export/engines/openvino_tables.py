"""Tables of embeddings in bf16, for networks whose float part runs in bf16.

    table f32 -> Gather -> f32 [b, L, H]             OpenVINO casts the rows for the sum, to another layout, and turns that back
    table bf16 -> Gather -> bf16 -> Convert -> f32   nothing is cast or turned

A Gather gives the type of its table whatever the precision hint says, and what follows reads bf16. So the rows that are added are the same,
at half of the bytes: of MiniLM-L6 in int8 the tables are four fifths of the file.

Left out: tables that something else reads too, such as a tied output layer, and codes of int8.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openvino
from openvino import opset13


def with_half_tables(network: Path, halved: Path) -> Path:
    """Writes a network with its tables in bf16, and returns its path.

    Args:
        network: An xml, its bin next to it.
        halved: Path of the xml to write; the bin goes next to it.

    Returns:
        `halved`, or `network` if it has no such table; nothing is written then.
    """
    model = openvino.Core().read_model(network)
    found = list(_tables(model))
    if not found:
        return network
    for gather in found:
        _halve(gather)
    model.validate_nodes_and_infer_types()
    openvino.save_model(model, halved, compress_to_fp16=False)
    return halved


def _tables(model: openvino.Model) -> Iterator[openvino.Node]:
    """Yields the lookups of float32 tables without other readers."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Gather":
            continue
        table = node.input_value(0)
        alone = len(table.get_target_inputs()) == 1 and table.get_node().get_type_name() == "Constant"
        if alone and table.get_element_type() == openvino.Type.f32 and len(table.get_shape()) == 2:
            yield node


def _halve(gather: openvino.Node) -> None:
    """Rounds the table that a node reads to bf16, to the nearest, ties to even; what follows reads float32 as before."""
    import torch

    table = gather.input_value(0).get_node()
    codes = torch.from_numpy(table.data.copy()).to(torch.bfloat16).view(torch.int16).numpy()
    tensor = openvino.Tensor(openvino.Type.bf16, openvino.Shape(codes.shape))
    tensor.data.view("int16")[...] = codes
    halved = opset13.constant(tensor)
    halved.set_friendly_name(table.get_friendly_name())
    output = gather.output(0)
    readers, names = list(output.get_target_inputs()), output.get_names()
    gather.input(0).replace_source_output(halved.output(0))
    whole = opset13.convert(output, "f32").output(0)
    for reader in readers:
        reader.replace_source_output(whole)
    output.set_names(set())
    whole.set_names(names)  # tensors keep the names of the ONNX graph
