"""The folder of a decoder for ONNX Runtime: its fused graph, its tokenizer and its settings.

model.onnx, model.onnx.data        the graph of `export.generation.fused_graph`
tokenizer.json, chat.json, ...     what text is read from (`export.generation.text_files`)
config.json, generation_config.json
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx

from export.generation.fused_graph import fused_graph, save_fused
from export.generation.genai_folder import write_generation_config
from export.generation.on_grids import on_grids
from export.generation.text_files import write_text_files
from foundation.artifacts.artifact import writing
from foundation.artifacts.graph import Graph
from foundation.models.folder import Checkpoint
from foundation.standalone.onnx_decoder import CACHE

MODEL = "model.onnx"
PRODUCTS = ("MatMulNBits", "MatMul", "FusedMatMul")
FLOAT_BYTES = 4


def write_fused_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes the folder of a checkpoint, float or quantized.

    Args:
        checkpoint: A decoder.
        folder: Folder to write; created.

    Raises:
        InputError: See `fused_graph`, `on_grids` and `write_text_files`.
    """
    graph = fused_graph(on_grids(checkpoint))
    with writing(folder) as temporary:
        save_fused(graph, temporary / MODEL)
        write_text_files(checkpoint, temporary)
        shutil.copyfile(checkpoint.folder / "config.json", temporary / "config.json")
        write_generation_config(checkpoint, temporary)


def reads_of(model: Graph) -> dict[str, int]:
    """Returns `weight_bytes` and `cache_bytes_per_token` of a graph: what it reads for each token (`export.generation.reads`)."""
    graph = model.structure
    read = {name for node in graph.node if node.op_type in PRODUCTS for name in node.input[1:]}
    sizes = (
        np.prod(one.dims, dtype=np.int64) * onnx.helper.tensor_dtype_to_np_dtype(one.data_type).itemsize
        for one in graph.initializer
        if one.name in read
    )
    shapes = ([axis.dim_value for axis in one.type.tensor_type.shape.dim] for one in graph.input if one.name.startswith(CACHE))
    return {"weight_bytes": int(sum(sizes)), "cache_bytes_per_token": sum(FLOAT_BYTES * shape[1] * shape[3] for shape in shapes)}
