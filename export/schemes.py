"""What becomes of a quantized checkpoint on each engine: its precision, its graphs, and which engines refuse it.

    scheme         precision      OpenVINO                    ONNX Runtime                   TensorRT
    w8a8           int8           Q/DQ                        Q/DQ, uint8 activations        Q/DQ
    w8a8-dynamic   int8-dynamic   int8 weights; quantizes     MatMulInteger, scales of the   refused: it takes activation scales
                                  the activations by itself   tokens in the graph            from the graph alone
    w4a16          w4a16          int4 weights, in groups     MatMulNBits, float products    int4 weights
                                  of equal width alone
    fp8            fp8            refused: no FP8 products    refused: it would make them    Q/DQ in E4M3
                                                              float, or fails

`model.onnx` is what OpenVINO and TensorRT read; ONNX Runtime has a file of its own for both int8 precisions.

Left out: int8 weights with float activations, which lose to int4 in size and to int8 in time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from compress.schemes.checkpoint import Scheme, scheme_of
from compress.standalone.preprocess import Preprocessor

Precision = Literal["int8", "int8-dynamic", "w4a16", "fp8", "fp32", "bf16"]
PRECISIONS: Mapping[str, Precision] = {"w8a8": "int8", "w8a8-dynamic": "int8-dynamic", "w4a16": "w4a16", "fp8": "fp8"}
"""By scheme."""
DYNAMIC = "model_dynamic.onnx"
"""The graph of ONNX Runtime for int8-dynamic."""
GROUP = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
"""OpenVINO's property; kept in its model, so that it is compiled alike wherever it is timed, evaluated or served."""
NO_DYNAMIC = "TensorRT takes the scales of activations from the graph alone; quantize with scheme w8a8"
NO_FP8 = "{} has no FP8 products: it would multiply in float; TensorRT has them, from compute capability 8.9 on"


def precision_of(checkpoint: Path) -> Precision:
    """Returns the precision of a checkpoint: fp32 where it is not quantized."""
    scheme = scheme_of(checkpoint)
    return "fp32" if scheme is None else PRECISIONS[scheme]


def write_graphs(checkpoint: Path, preprocessor: Preprocessor, model: Path, engines: Collection[str]) -> Path:
    """Writes the graphs of a checkpoint, float or quantized.

    Args:
        checkpoint: The checkpoint.
        preprocessor: Gives modality and input names.
        model: The file to write; that of ONNX Runtime for int8-dynamic goes beside it.
        engines: Those of the target.

    Returns:
        `model`.

    Raises:
        ValueError: Graph and checkpoint do not belong together.
    """
    from export.graph.onnx import export_float

    scheme = scheme_of(checkpoint)
    if scheme is None:
        return export_float(checkpoint, preprocessor, model)
    with tempfile.TemporaryDirectory(dir=model.parent, prefix="float-") as folder:
        floating = export_float(checkpoint, preprocessor, Path(folder, model.name))
        _quantize(scheme, floating, checkpoint, model, engines)
    return model


def _quantize(scheme: Scheme | str, floating: Path, checkpoint: Path, model: Path, engines: Collection[str]) -> None:
    """Writes the graphs of a quantized checkpoint from the float one that `export.graph.onnx.export_float` wrote for it."""
    from export.graph.qdq import insert_qdq
    from export.graph.qdq_schemes import insert_dynamic, insert_fp8, insert_weights

    match scheme:
        case "w8a8":
            insert_qdq(floating, checkpoint, model)
        case "w8a8-dynamic":
            insert_weights(floating, checkpoint, model)
            if "onnxruntime" in engines:
                insert_dynamic(floating, checkpoint, model.with_name(DYNAMIC))
        case "w4a16":
            insert_weights(floating, checkpoint, model)
        case "fp8":
            insert_fp8(floating, checkpoint, model)
        case _:
            raise ValueError(f"{checkpoint}: scheme {scheme} has no graph")


def refusal(engine: str, precision: Precision, model: Path) -> str | None:
    """Returns in one line why an engine cannot take a precision; None where it can.

    Args:
        engine: Its name.
        precision: Of the build.
        model: What `write_graphs` wrote.
    """
    from export.graph.qdq_schemes import uneven

    if engine == "tensorrt" and precision == "int8-dynamic":
        return NO_DYNAMIC
    if precision == "fp8" and engine in ("openvino", "onnxruntime"):
        return NO_FP8.format({"openvino": "OpenVINO on a CPU", "onnxruntime": "ONNX Runtime"}[engine])
    short = uneven(model) if engine == "openvino" and precision == "w4a16" else None
    return None if short is None else f"OpenVINO reads int4 in groups of equal width alone: {short}; give a group_size that divides them"


def runtime_options(precision: Precision, model: Path) -> dict[str, str]:
    """Returns what OpenVINO is told about quantizing activations by itself: in groups for int8-dynamic, not at all for w4a16."""
    from export.graph.qdq_schemes import group_size

    match precision:
        case "int8-dynamic":
            return {GROUP: str(group_size(model))}
        case "w4a16":
            return {GROUP: "0"}
        case _:
            return {}
