#!/usr/bin/env bash
# ONNX Runtime 1.31.1: four settings of calibration in quantize_static do something else than their names say. The guesses were that Entropy weighs
# rounding against clipping, that Percentile clips the rarest numbers and no more, that CalibMaxIntermediateOutputs saves memory and leaves the
# ranges alone ("the same result", says the documentation), and that CalibMovingAverage is the moving average with the constant that can be set.
#
# Seen (2026-11-28): Entropy makes 128 bins for 128 levels, so it has one threshold to choose from, and writes the file that MinMax writes, byte for
# byte; with 2,048 bins, which quantize_static cannot be asked for, its range is 14.7 instead of 64.6. Percentile takes the lower edge of the bin it
# ends in: where one number is 2,048 times larger than all others, as activations of large models are, that edge is 0, and every answer is lost. With
# CalibMaxIntermediateOutputs=5 the ranges of each five batches are thrown away before they are used, and the last 1 of 16 decides: an error of 54 %
# instead of 1.8 %. CalibMovingAverage is a plain mean over the batches, whatever the constant. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - "$folder" <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import contextlib
import io
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper, parser
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static
from onnxruntime.quantization.calibrate import create_calibrator

FOLDER, BATCHES, EACH, WIDTH = Path(sys.argv[1]), 16, 64, 256
GENERATOR = np.random.default_rng(0)
WEIGHTS = GENERATOR.standard_normal((WIDTH, 16)).astype(np.float32) / 16
NORMAL = GENERATOR.standard_normal((BATCHES * EACH, WIDTH)).astype(np.float32)
TESTED = GENERATOR.standard_normal((EACH, WIDTH)).astype(np.float32)


class Rows(CalibrationDataReader):
    def __init__(self, rows: np.ndarray) -> None:
        self.batches: Iterator[np.ndarray] = iter(np.split(rows, BATCHES))

    def get_next(self) -> dict[str, np.ndarray] | None:
        batch = next(self.batches, None)
        return None if batch is None else {"x": batch}


def quantized(rows: np.ndarray, method: CalibrationMethod = CalibrationMethod.MinMax, **options: object) -> tuple[bytes, float, float]:
    """The file, the width of the range of x, and the error on rows without outliers, as a share of the answers."""
    source, made = FOLDER / "float.onnx", FOLDER / "int8.onnx"
    model = parser.parse_model('<ir_version: 9, opset_import: ["": 17]> product (float[n, 256] x) => (float[n, 16] y) { y = MatMul (x, w) }')
    model.graph.initializer.append(numpy_helper.from_array(WEIGHTS, "w"))
    onnx.save(model, source)
    with contextlib.redirect_stdout(io.StringIO()):
        quantize_static(source, made, Rows(rows), calibrate_method=method, activation_type=QuantType.QUInt8, extra_options=options)
    scales = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(made).graph.initializer}
    [answers] = onnxruntime.InferenceSession(made).run(None, {"x": TESTED})
    right = TESTED @ WEIGHTS
    return made.read_bytes(), 255 * float(scales["x_scale"]), float(np.linalg.norm(answers - right) / np.linalg.norm(right))


def searched(rows: np.ndarray) -> float:
    """The width that Entropy finds with more bins than codes, which quantize_static cannot be asked for."""
    method, options = CalibrationMethod.Entropy, {"num_bins": 2048}
    with contextlib.redirect_stdout(io.StringIO()):
        calibrator = create_calibrator(FOLDER / "float.onnx", ["MatMul"], str(FOLDER / "augmented.onnx"), method, extra_options=options)
        calibrator.collect_data(Rows(rows))
        low, high = calibrator.compute_data()["x"].range_value
    return float(high - low)


print(f"onnxruntime {version('onnxruntime')}, {NORMAL.size} numbers with a spread of 1")
rows = NORMAL.copy()
rows[::EACH, 0] = 60
(minmax, wide, error), (entropy, *_) = quantized(rows), quantized(rows, CalibrationMethod.Entropy)
narrow = searched(rows)
print(f"some are 60: MinMax and Entropy write the same file: {minmax == entropy}, range {wide:.1f}, error {error:.3f}; 2048 bins: range {narrow:.1f}")
assert minmax == entropy and wide > 60 and narrow < 20, "the behaviour has changed"

rows = NORMAL.copy()
clipped = {}
for rows[0, 0] in (1000, 10000):
    _, width, error = clipped[int(rows[0, 0])] = quantized(rows, CalibrationMethod.Percentile)
    print(f"one is {rows[0, 0]:.0f}: Percentile takes a range of {width:.1f}, error {error:.3f}")
assert clipped[1000][1] > 8 and clipped[10000][1] < 0.001 and clipped[10000][2] > 0.99, "the behaviour has changed"

rows = NORMAL.copy()
rows[-EACH:] /= 4
whole, some = quantized(rows), quantized(rows, CalibMaxIntermediateOutputs=5)
print(f"the last of {BATCHES} batches is 4 times smaller: range {whole[1]:.2f}, error {whole[2]:.3f}")
print(f"the same with at most 5 intermediate outputs: range {some[1]:.2f}, error {some[2]:.3f}")
assert whole[1] > 3 * some[1] and some[2] > 10 * whole[2], "the behaviour has changed"

slow, fast = (quantized(rows, CalibMovingAverage=True, CalibMovingAverageConstant=constant) for constant in (0.01, 0.9))
print(f"moving average with the constants 0.01 and 0.9: ranges {slow[1]:.2f} and {fast[1]:.2f}")
assert slow[0] == fast[0], "the behaviour has changed"
PYTHON
