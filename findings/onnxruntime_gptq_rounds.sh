#!/usr/bin/env bash
# ONNX Runtime 1.31.1: GPTQ of MatMulNBitsQuantizer is rounding to nearest, whatever the calibration data, and each of its options is worse. The guesses
# were that the error of a weight is passed on to the weights that are not rounded yet, as in the paper, and that a search for the range
# does no harm.
#
# Seen (2026-12-01): the error is multiplied with a column of an upper triangular factor where its row is meant. Below the diagonal that column is 0, so
# nothing is passed on. The file is the same, byte for byte, for two sets of calibration data and for any damping, and with zero points it gives the
# answers of RTN to six digits. Inputs of Transformers are correlated: with 256 inputs of 8 directions and a little noise the answers are off by 8.7 %, as after rounding,
# where GPTQ by the paper is off by 2.3 %. The symmetric grid, the default, is rounded to and then replaced by another one: 12.8 %, where RTN is at
# 10.2 %. `mse` compares codes from 0 to 15 with weights (10.7 and 13.1 %). `actorder` makes its groups in an order that the file does not have (10.8 and
# 13.6 %). perchannel=False searches one scale for all columns, and the file has one for each (16.4 and 17.1 %). Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile onnx==1.23.2 onnx-ir==1.1.0 onnxruntime==1.31.1 torch==2.13.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import contextlib
import io
from importlib.metadata import version

import numpy as np
import onnxruntime
from onnx import numpy_helper, parser
from onnxruntime.quantization import CalibrationDataReader
from onnxruntime.quantization.matmul_nbits_quantizer import GPTQWeightOnlyQuantConfig, MatMulNBitsQuantizer, RTNWeightOnlyQuantConfig

INPUTS, OUTPUTS, GROUP, DAMPING = 256, 64, 32, 0.01
GENERATOR = np.random.default_rng(0)
WEIGHTS = GENERATOR.standard_normal((INPUTS, OUTPUTS)).astype(np.float32) / 16
DIRECTIONS = GENERATOR.standard_normal((8, INPUTS))


def correlated(rows):
    """Inputs [rows, INPUTS] of few directions and some noise."""
    noise = GENERATOR.standard_normal((rows, INPUTS)) / 5
    return (GENERATOR.standard_normal((rows, len(DIRECTIONS))) @ DIRECTIONS / 3 + noise).astype(np.float32)


CALIBRATION, TESTED = correlated(1024), correlated(256)
RIGHT = TESTED @ WEIGHTS


class Rows(CalibrationDataReader):
    def __init__(self, rows):
        self.batches = iter([rows])

    def get_next(self):
        batch = next(self.batches, None)
        return None if batch is None else {"x": batch}


def off(answers):
    """The error, as a share of the answers."""
    return float(np.linalg.norm(answers - RIGHT) / np.linalg.norm(RIGHT))


def quantized(symmetric, config):
    """The file, its answers, and their error."""
    model = parser.parse_model(f"""<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]>
        product (float[n, {INPUTS}] x) => (float[n, {OUTPUTS}] y) {{ y = MatMul (x, w) }}""")
    model.graph.node[0].name = "product"
    model.graph.initializer.append(numpy_helper.from_array(WEIGHTS, "w"))
    with contextlib.redirect_stdout(io.StringIO()):
        quantizer = MatMulNBitsQuantizer(model, block_size=GROUP, is_symmetric=symmetric, algo_config=config)
        quantizer.process()
    made = quantizer.model.model.SerializeToString()
    [answers] = onnxruntime.InferenceSession(made).run(None, {"x": TESTED})
    return made, answers, off(answers)


def gptq(symmetric, rows=CALIBRATION, **options):
    return quantized(symmetric, GPTQWeightOnlyQuantConfig(calibration_data_reader=Rows(rows), **options))


def published():
    """GPTQ (https://arxiv.org/abs/2210.17323), step by step, with the grid with zero points of the library."""
    weights, made = WEIGHTS.astype(np.float64), np.zeros_like(WEIGHTS)
    hessian = 2 * CALIBRATION.astype(np.float64).T @ CALIBRATION / len(CALIBRATION)
    hessian += DAMPING * hessian.diagonal().mean() * np.eye(INPUTS)
    factor = np.linalg.cholesky(np.linalg.inv(hessian)).T
    for row in range(INPUTS):
        if row % GROUP == 0:
            group = weights[row : row + GROUP]
            low, high = np.minimum(group.min(0), 0), np.maximum(group.max(0), 0)
            scale = (high - low) / 15
            zero = np.round(-low / scale)
        made[row] = scale * (np.clip(np.round(weights[row] / scale) + zero, 0, 15) - zero)
        weights[row:] -= np.outer(factor[row, row:], (weights[row] - made[row]) / factor[row, row])
    return made


print(f"onnxruntime {version('onnxruntime')}, 4 bits, groups of {GROUP}")
changed, paper = "the behaviour has changed", off(TESTED @ published())
other = GENERATOR.standard_normal(CALIBRATION.shape).astype(np.float32) * 100
print(f"GPTQ by the paper, with zero points: {paper:.2%}")
for symmetric in (False, True):
    rounded, (made, answers, error) = quantized(symmetric, RTNWeightOnlyQuantConfig()), gptq(symmetric)
    same = made == gptq(symmetric, other)[0] == gptq(symmetric, percdamp=10.0)[0]
    equal = bool(np.abs(answers - rounded[1]).max() < 1e-5 * np.abs(answers).max())
    print(f"symmetric={symmetric}: rounding {rounded[2]:.2%}, GPTQ {error:.2%}; the same answers to five digits: {equal}")
    print(f"the same file for other data and another damping: {same}")
    assert same and equal is not symmetric and error > 1.2 * rounded[2] * symmetric and error > 3 * paper, changed
    for options in ({"mse": True}, {"actorder": True}, {"perchannel": False}):
        worse = gptq(symmetric, **options)[2]
        print(f"{options}: {worse:.2%}")
        assert worse > 1.15 * rounded[2], changed
PYTHON
