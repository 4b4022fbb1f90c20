"""The graphs of a checkpoint: a float graph, or a graph that depends on how the scheme quantizes weights and activations.

    weights   activations   `model.onnx`                           for engines that need the scale of a token in the graph
    int8      static        Q/DQ (`qdq`)
    int8      dynamic       int8 weights (`qdq_schemes`)           `model_dynamic.onnx`: MatMulInteger
    int8      float         int8 weights
    int4      float         int4 weights in groups, with zero points uint4
    fp8       static        Q/DQ in E4M3

Every engine reads `model.onnx`, or makes its own file of it; its own file says which precisions an engine refuses.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

from export.engines.registry import engine_module
from export.graph.onnx import export_float
from export.graph.qdq import insert_qdq
from export.graph.qdq_schemes import insert_fp8, insert_weights
from foundation.artifacts.graph import Graph
from foundation.models.folder import Checkpoint
from foundation.schemes.table import SCHEMES, SchemeFacts
from foundation.standalone.preprocess import Preprocessor


def precision_of(checkpoint: Checkpoint) -> str:
    """Returns the precision of a checkpoint: fp32 where it is not quantized."""
    scheme = checkpoint.scheme
    return "fp32" if scheme is None else SCHEMES[scheme].precision


def write_graphs(checkpoint: Checkpoint, preprocessor: Preprocessor, model: Path, engines: Collection[str]) -> Path:
    """Writes the graphs of a checkpoint, float or quantized.

    Args:
        checkpoint: The checkpoint.
        preprocessor: Provides modality and input names.
        model: The file to write; engine-specific graphs (`write_graph` of its file) go next to it.
        engines: The engines of the target.

    Returns:
        `model`.

    Raises:
        ValueError: Graph and checkpoint do not belong together.
    """
    scheme, all_tokens = checkpoint.scheme, any(engine_module(engine).all_tokens() for engine in engines)
    if scheme is None:
        return export_float(checkpoint, preprocessor, model, all_tokens)
    with tempfile.TemporaryDirectory(dir=model.parent, prefix="float-") as folder:
        floating = export_float(checkpoint, preprocessor, Path(folder, model.name), all_tokens)
        facts = SCHEMES[scheme]
        _quantize(facts, floating, checkpoint, model)
        for engine in engines:
            engine_module(engine).write_graph(facts, floating, checkpoint, model)
    return model


def _quantize(scheme: SchemeFacts, floating: Path, checkpoint: Checkpoint, model: Path) -> None:
    """Writes the graph of a quantized checkpoint from the float one that `export_float` wrote for it."""
    if scheme.activations != "static":
        insert_weights(Graph(floating), checkpoint, model)
    elif scheme.integer:
        insert_qdq(Graph(floating), checkpoint, model)
    else:
        insert_fp8(Graph(floating), checkpoint, model)
