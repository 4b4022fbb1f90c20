#!/usr/bin/env bash
# LiteRT 2.3.0 (TFLite models), ai-edge-quantizer 0.10.0, CPU (x86): in 8 and 16 bits a quotient near 0 becomes the largest or the smallest number of the
# output. The guess was a quotient that is right to one step, as it is for the products, sums and differences of the same kernels.
#
# Seen (2026-12-01), models of one division, quantized by the recipes static_wi8_ai8 and static_wi8_ai16: sums (of size 8) over counts from 1 to 128, as in
# mean pooling. A quarter of the means are the code -128 or 127 in 8 bits, where all of them belong within a step of 0; the error is 14 times as large as
# the means, without these elements it is 6 %. In 16 bits one mean in a thousand is wrong, and the error is 90 % against 0.02 %. A quotient below 1/16 of a
# step of the output is always wrong unless the dividend is 0, one above half a step never. So small dividends and a wide range of divisors are hit: a row
# divided by its own standard deviation comes out right. The three resolvers (AUTO, BUILTIN_REF and without delegates) agree, so comparing them shows
# nothing. The kernel shifts a 32-bit number by the sum of three exponents (DivElementwise in reference/div.h). Above 31 that is undefined in C++, and x86
# takes it modulo 32. No error is raised, as there is for a divisor of 0. No public report was found. A division left in float avoids it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile ai-edge-quantizer==0.10.0 ai-edge-litert==2.3.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { tail -30 "$folder/log"; exit 1; }
import contextlib
import io
from importlib.metadata import version

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from ai_edge_quantizer import quantizer, recipe

ROWS, COLUMNS = 1024, 16
generator = np.random.default_rng(0)
changed = "the behaviour has changed"


def made(kind, **fields):
    thing = kind()
    for name, value in fields.items():
        assert hasattr(thing, name), name
        setattr(thing, name, value)
    return thing


def division(columns):
    """A TFLite model z = x / y in float, where y has `columns` columns."""
    shapes = {b"x": [ROWS, COLUMNS], b"y": [ROWS, columns], b"z": [ROWS, COLUMNS]}
    tensors = [made(schema.TensorT, name=name, shape=shape, type=schema.TensorType.FLOAT32) for name, shape in shapes.items()]
    options = dict(builtinOptionsType=schema.BuiltinOptions.DivOptions, builtinOptions=schema.DivOptionsT())
    node = made(schema.OperatorT, opcodeIndex=0, inputs=[0, 1], outputs=[2], **options)
    graph = made(schema.SubGraphT, name=b"main", tensors=tensors, inputs=[0, 1], outputs=[2], operators=[node])
    ends = [made(schema.TensorMapT, name=name, tensorIndex=index) for index, name in enumerate((b"x", b"y", b"z"))]
    signature = made(schema.SignatureDefT, signatureKey=b"serving_default", subgraphIndex=0, inputs=ends[:2], outputs=ends[2:])
    number = schema.BuiltinOperator.DIV
    code = made(schema.OperatorCodeT, builtinCode=number, deprecatedBuiltinCode=number, version=1)
    parts = dict(buffers=[schema.BufferT()], operatorCodes=[code], subgraphs=[graph], signatureDefs=[signature])
    builder = flatbuffers.Builder(1024)
    builder.Finish(made(schema.ModelT, version=3, **parts).Pack(builder), b"TFL3")
    return bytearray(builder.Output())


def codes(numbers, tensor):
    scale, zero = tensor["quantization"]
    limits = np.iinfo(tensor["dtype"])
    return np.clip(np.round(numbers / scale) + zero, limits.min, limits.max).astype(tensor["dtype"])


def numbers(codes, tensor):
    scale, zero = tensor["quantization"]
    return (codes.astype(np.float64) - zero) * scale


def compare(name, bits, x, y):
    """Share of wrong elements, and the error with and without them."""
    task = quantizer.Quantizer(division(y.shape[1]))
    task.load_quantization_recipe(getattr(recipe, f"static_wi8_ai{bits}")())
    with contextlib.redirect_stdout(io.StringIO()):
        model = task.quantize(task.calibrate({"serving_default": [{"x": x, "y": y}]})).quantized_model
    answers = []
    for resolver in (OpResolverType.AUTO, OpResolverType.BUILTIN_REF, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES):
        interpreter = Interpreter(model_content=bytes(model), experimental_op_resolver_type=resolver, num_threads=1)
        interpreter.allocate_tensors()
        first, second = sorted(interpreter.get_input_details(), key=lambda tensor: tensor["name"])
        [output] = interpreter.get_output_details()
        assert first["dtype"] is second["dtype"] is output["dtype"] is getattr(np, f"int{bits}")
        stored = codes(x, first), codes(y, second)
        for tensor, value in zip((first, second), stored, strict=True):
            interpreter.set_tensor(tensor["index"], value)
        interpreter.invoke()
        answers.append(interpreter.get_tensor(output["index"]))
    assert all(np.array_equal(answers[0], other) for other in answers[1:]), changed
    dividends = numbers(stored[0], first)
    quotients = dividends / numbers(stored[1], second)
    wrong = np.abs(answers[0].astype(int) - codes(quotients, output)) > 2
    steps = np.abs(quotients) / output["quantization"][0]
    found, right = numbers(answers[0], output), x / y
    with_them = float(np.linalg.norm(found - right) / np.linalg.norm(right))
    without = float(np.linalg.norm((found - right)[~wrong]) / np.linalg.norm(right))
    largest = f", all where the quotient is below {steps[wrong].max():.2f} steps" if wrong.any() else ""
    print(f"{name}, {bits} bits: {wrong.mean():.2%} wrong{largest}; off by {with_them:.1%}, without these by {without:.2%}")
    limits = np.iinfo(output["dtype"])
    assert set(answers[0][wrong].tolist()) <= {limits.min, limits.max}, changed
    assert wrong[(dividends != 0) & (steps < 1 / 16)].all() and not wrong[steps > 0.5].any(), changed
    return float(wrong.mean()), with_them, without


def normal(*shape):
    return generator.normal(size=shape).astype(np.float32)


print(f"ai-edge-litert {version('ai-edge-litert')}, ai-edge-quantizer {version('ai-edge-quantizer')}")
rows = normal(ROWS, COLUMNS) * np.exp(0.7 * normal(ROWS, 1))
cases = {
    "a sum / a count": (8 * normal(ROWS, COLUMNS), generator.integers(1, 129, (ROWS, 1)).astype(np.float32)),
    "normal / uniform in 0.1 to 10": (normal(ROWS, COLUMNS), generator.uniform(0.1, 10, (ROWS, COLUMNS)).astype(np.float32)),
    "a row / its standard deviation": (rows, rows.std(1, keepdims=True)),
}
seen = {(name, bits): compare(name, bits, *case) for bits in (8, 16) for name, case in cases.items()}
share, error, without = seen["a sum / a count", 8]
assert share > 0.15 and error > 5 and without < 0.1, changed
share, error, without = seen["normal / uniform in 0.1 to 10", 8]
assert share > 0.05 and error > 3 and without < 0.15, changed
assert seen["a sum / a count", 16][1] > 0.3 and seen["a sum / a count", 16][2] < 0.01, changed
assert seen["a row / its standard deviation", 8][1] < 0.1 and seen["a row / its standard deviation", 16][1] < 0.01
PYTHON
