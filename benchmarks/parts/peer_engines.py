"""int8 by the tools that a user would reach for instead, each with the settings that its documentation gives for Transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from foundation.models.folder import Checkpoint
from foundation.standalone.preprocess import Preprocessor, Row


def ordinary_export(checkpoint: Path, folder: Path, out: Path) -> Path:
    """Writes the float ONNX model that peers get: exporters compute all tokens of the last layer, whatever the head reads.

    Args:
        checkpoint: Transformers folder.
        folder: Where its preprocess.json lies.
        out: The .onnx file to write.
    """
    from export.graph.onnx import export_float

    return export_float(Checkpoint(checkpoint), Preprocessor.load(folder), out, all_tokens=True)


def nncf_int8(onnx: Path, folder: Path, rows: Sequence[Row], out: Path) -> Path:
    """Quantizes a float model with NNCF, calibrated on `rows`; returns the IR for OpenVINO.

    Args:
        onnx: The float model.
        folder: Where its preprocess.json lies.
        rows: Calibration rows.
        out: The .xml file to write.
    """
    import nncf
    import openvino

    processor = Preprocessor.load(folder)
    dataset = nncf.Dataset([processor.encode([row]) for row in rows])
    model = openvino.Core().read_model(onnx)
    quantized = nncf.quantize(model, dataset, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(rows))
    openvino.save_model(quantized, out, compress_to_fp16=False)
    return out


def onnxruntime_dynamic_int8(onnx: Path, out: Path) -> Path:
    """Quantizes a float model with ONNX Runtime's dynamic quantization, per channel but for embedding tables; returns the file."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(onnx, out, per_channel=True, reduce_range=False, weight_type=QuantType.QInt8)
    return out


def onnxruntime_static_int8(onnx: Path, folder: Path, rows: Sequence[Row], out: Path) -> Path:
    """Quantizes the products of a float model with ONNX Runtime's static quantization (Q/DQ, per channel, min-max); returns the ONNX file.

    Activations are uint8, which is what its fast kernels on x86 take; see `nncf_int8` for the arguments.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    processor = Preprocessor.load(folder)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches: Iterator[Any] = ({**processor.encode([row])} for row in rows)

        def get_next(self) -> Any:
            return next(self.batches, None)

    quantize_static(
        onnx,
        out,
        Reader(),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    return out
