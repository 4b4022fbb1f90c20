#!/usr/bin/env bash
# coremltools 9.0 (Core ML): linear_quantize_activations takes its range from the last sample alone, and the zero points of mode="linear" are wrong where
# numbers go beyond 512.
# The guesses were that a list of samples gives the range of all of them, in whatever order, and that a zero point of 8 bits is right at any size of the
# numbers, as a scale is.
#
# Seen (2026-12-01): each sample writes its smallest and its largest number over those of the samples before, and compares only then. Of 32 samples, one
# of which goes to 10 and the others to 1, the range goes to 10 if that one comes last, and to 1 if it comes anywhere else: its numbers are then off
# by 86 %, not by 0.4 %. The same rows in one sample give the range of all. So more samples for calibration change nothing. (Seen on the input of a
# layer; numbers inside of a network need a Mac, and the same lines record them.) A zero point is computed in float16, from numbers multiplied
# by 127 and 128, and float16 ends at 65504. From -100 to 500 it is right. From -100 to 1000 it is -128 and not -105, and all negative numbers become 0; from
# -600 to 1000 it is the cast of a NaN. Activations of Transformers grow that large. linear_quantize_weights has the same zero points in a float16 model:
# weights up to 1000 are off by 97 %, in a float32 model by 0.5 %. mode="linear_symmetric", the default, has no zero point and is right. NumPy
# warns of an overflow, coremltools of nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq coremltools==9.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { tail -30 "$folder/log"; exit 1; }
from importlib.metadata import version

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder
from coremltools.optimize.coreml import (
    OpLinearQuantizerConfig,
    OptimizationConfig,
    decompress_weights,
    get_weights_metadata,
    linear_quantize_activations,
    linear_quantize_weights,
)

SIZE = 64
generator = np.random.default_rng(0)
FLOAT16, FLOAT32 = ct.precision.FLOAT16, ct.precision.FLOAT32
changed = "the behaviour has changed"


def layer(weights, rows, precision):
    @Builder.program(input_specs=[Builder.TensorSpec(shape=(rows, SIZE))], opset_version=ct.target.iOS18)
    def program(x):
        return Builder.linear(x=x, weight=weights, name="y")

    settings = dict(convert_to="mlprogram", minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    return ct.convert(program, compute_precision=precision, **settings)


def config(mode):
    return OptimizationConfig(global_config=OpLinearQuantizerConfig(mode=mode, dtype="int8", weight_threshold=1))


def stored(model):
    """Scale and zero point of the quantized input, as they stand in the file."""
    [block] = model.get_spec().mlProgram.functions["main"].block_specializations.values()
    constants = {op.outputs[0].name: op.attributes["val"].immediateValue.tensor for op in block.operations if op.type == "const"}
    [quantize] = [op for op in block.operations if op.type == "quantize"]
    settings = {name: constants[given.arguments[0].name] for name, given in quantize.inputs.items() if name != "input"}
    [scale], [kind] = settings["scale"].floats.values, settings["output_dtype"].strings.values
    if "zero_point" in settings:
        return scale, int(np.frombuffer(settings["zero_point"].bytes.values, kind)[0]) - 128 * (kind == "uint8")
    return scale, -128 if kind == "uint8" else 0


def calibrated(samples, mode):
    model = layer(np.eye(SIZE, dtype=np.float32), len(samples[0]), FLOAT32)
    return stored(linear_quantize_activations(model, config(mode), [{"x": x} for x in samples]))


def seen(x, scale, zero):
    """What is left of numbers that are quantized and dequantized."""
    return scale * (np.clip(np.rint(x / scale) + zero, -128, 127) - zero)


def off(found, right):
    return float(np.linalg.norm(found.astype(np.float64) - right) / np.linalg.norm(right))


print(f"coremltools {version('coremltools')}, numpy {np.__version__}")
small = [generator.uniform(-1, 1, (1, SIZE)).astype(np.float32) for _ in range(31)]
large = generator.uniform(-10, 10, (1, SIZE)).astype(np.float32)
top = {}
for name, samples in (("first", [large, *small]), ("in the middle", [*small[:15], large, *small[15:]]), ("last", [*small, large])):
    for rows, given in (("one by one", samples), ("in one sample", [np.concatenate(samples)])):
        scale, zero = calibrated(given, "linear_symmetric")
        top[name, rows] = 127 * scale
        print(
            f"the large sample comes {name}, {rows}: range up to {127 * scale:.2f}, it is off by {off(seen(large, scale, zero), large):.1%}"
        )
for (name, rows), end in top.items():
    assert (end > 9.5) == (rows == "in one sample" or name == "last") and (end > 9.5 or end < 1.1), changed

for low, high in ((-100, 500), (-100, 1000), (-600, 1000)):
    x = generator.uniform(low, high, (1, SIZE)).astype(np.float32)
    x[0, :2] = low, high
    for mode in ("linear", "linear_symmetric"):
        scale, zero = calibrated([x], mode)
        right = np.rint(-128 - low * 255 / (high - low)) if mode == "linear" else 0
        error, best = off(seen(x, scale, zero), x), off(seen(x, scale, right), x)
        print(f"{low} to {high}, {mode}: zero point {zero} where it is {right:.0f}, off by {error:.1%} where it is {best:.1%}")
        assert best < 0.01 and (error > 0.02 and zero in (-128, 0) if mode == "linear" and high == 1000 else error < 0.01), changed

weights = generator.normal(size=(SIZE, SIZE)).astype(np.float32)
for size in (400, 1000):
    scaled = (weights * size / np.abs(weights).max()).astype(np.float16).astype(np.float32)
    for mode in ("linear", "linear_symmetric"):
        for name, precision in (("float16", FLOAT16), ("float32", FLOAT32)):
            model = decompress_weights(linear_quantize_weights(layer(scaled, 1, precision), config(mode)))
            [back] = [entry.val for entry in get_weights_metadata(model, weight_threshold=1).values() if entry.val.shape == scaled.shape]
            error = off(back, scaled)
            print(f"weights up to {size}, {mode}, {name} model: off by {error:.2%}")
            assert (error > 0.5) if size == 1000 and mode == "linear" and name == "float16" else (error < 0.01), changed
PYTHON
