#!/usr/bin/env bash
# ONNX Runtime 1.31.1: RTN and k_quant of MatMulNBitsQuantizer write 4 bits where 8 are asked for, and lose weights of one sign. The guesses were that
# bits=8 means 8 bits whichever the algorithm, and that a weight is off by half a step of its block at most.
#
# Seen (2026-11-28): the default algorithm reads `bits`, RTN and k_quant always write 4, with the error of 4 bits (8 % of the answers instead of
# 0.5 %). The zero point of both lies at the smallest weight of a block, where it has to be 0 or more. A block of positive weights (0.5 to 1) is cut
# off at its largest code, and its answers are off by 42 % instead of 2 %; a matrix of equal weights, such as one that averages, becomes 0. Nothing
# warns and nothing in the file looks wrong. `customized_weight_config` of a node can ask for 8 bits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq onnx==1.23.2 onnx-ir==1.1.0 onnxruntime==1.31.1 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import contextlib
import io
from importlib.metadata import version

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper, parser
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    KQuantWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
    RTNWeightOnlyQuantConfig,
)

BLOCK = 32
GENERATOR = np.random.default_rng(0)
ROWS = GENERATOR.standard_normal((64, 256)).astype(np.float32)


def off(weights: np.ndarray, algorithm: str, bits: int) -> tuple[float, int]:
    """Error of the answers as a share of their size, and the bits that the file says."""
    model = parser.parse_model('<ir_version: 10, opset_import: ["": 21]> product (float[n, 256] x) => (float[n, 16] y) { y = MatMul (x, w) }')
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    model.graph.node[0].name = "product"
    config = {
        "default": DefaultWeightOnlyQuantConfig(block_size=BLOCK, is_symmetric=False, bits=bits),
        "RTN": RTNWeightOnlyQuantConfig(),
        "k_quant": KQuantWeightOnlyQuantConfig(),
    }[algorithm]
    quantizer = MatMulNBitsQuantizer(model, bits=bits, block_size=BLOCK, is_symmetric=False, algo_config=config)
    with contextlib.redirect_stdout(io.StringIO()):
        quantizer.process()
    made = quantizer.model.model
    [node] = [node for node in made.graph.node if node.op_type == "MatMulNBits"]
    [stored] = [attribute.i for attribute in node.attribute if attribute.name == "bits"]
    [answers] = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"x": ROWS})
    right = ROWS @ weights
    return float(np.linalg.norm(answers - right) / np.linalg.norm(right)), stored


kinds = {
    "normal": GENERATOR.standard_normal((256, 16)).astype(np.float32) / 16,
    "positive": GENERATOR.uniform(0.5, 1, (256, 16)).astype(np.float32),
    "averaging": np.full((256, 16), 1 / 256, np.float32),
}
print(f"onnxruntime {version('onnxruntime')}, onnx {onnx.__version__}, blocks of {BLOCK}")
seen = {}
for kind, weights in kinds.items():
    for algorithm in ("default", "RTN", "k_quant"):
        seen[kind, algorithm] = {bits: off(weights, algorithm, bits) for bits in (4, 8)}
        for bits, (error, stored) in seen[kind, algorithm].items():
            print(f"{kind} weights, {algorithm}, bits={bits}: {stored} bits in the file, off by {error:.3f}")
assert seen["normal", "default"][8][1] == 8 and seen["normal", "default"][8][0] < 0.01
assert max(seen[kind, "default"][4][0] for kind in ("positive", "averaging")) < 0.05
for algorithm in ("RTN", "k_quant"):
    assert seen["normal", algorithm][8] == seen["normal", algorithm][4] and seen["normal", algorithm][8][1] == 4, "the behaviour has changed"
    assert seen["positive", algorithm][4][0] > 0.3 and seen["averaging", algorithm][4][0] > 0.99, "the behaviour has changed"
PYTHON
