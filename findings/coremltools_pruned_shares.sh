#!/usr/bin/env bash
# coremltools 9.0 (Core ML): prune_weights with a target_sparsity prunes every weight of a quantized model that is as large as the last one it has to, and
# blocks of a float16 model by squares that are rounded to 0.
# The guesses were that target_sparsity is the share of zeros up to one part in thousands, whatever the weights ("the fraction of values with the least
# absolute value"), and that a block is as large relative to the others in float16 as in float32.
#
# Seen (2026-12-01): all up to the percentile is pruned, and a quantized weight has few sizes. With joint_compression=True and target_sparsity=0.25, of
# int4 weights with one scale 60 % are pruned, of a palette of 8 entries 38 %, of weights of one size and two signs all: the layer answers 0. Float
# weights, and nearly so int8 ones, have the share that was asked for. With block_size the squares of the weights are summed up in the type of
# the weights. Squares of float16 end at 6e-8, so blocks of weights below 0.0002 are 0, and 0 is at most the percentile, which is 0 as well. Of
# weights with a standard deviation of 0.0003 57 % are pruned where it should be 50, with 0.0001 70 %, with 0.00001 all. float16 is the default of a
# conversion. Without block_size, and in a float32 model, half are pruned. Nothing warns.
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
    OpMagnitudePrunerConfig,
    OpPalettizerConfig,
    OptimizationConfig,
    decompress_weights,
    get_weights_metadata,
    linear_quantize_weights,
    palettize_weights,
    prune_weights,
)

SIZE = 64
generator = np.random.default_rng(0)
changed = "the behaviour has changed"


def layer(weights, precision=ct.precision.FLOAT32):
    @Builder.program(input_specs=[Builder.TensorSpec(shape=(1, SIZE))], opset_version=ct.target.iOS18)
    def program(x):
        return Builder.linear(x=x, weight=weights, name="y")

    settings = dict(convert_to="mlprogram", minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    return ct.convert(program, compute_precision=precision, **settings)


def weights_of(model):
    [back] = [entry.val for entry in get_weights_metadata(decompress_weights(model), weight_threshold=1).values() if entry.val.ndim == 2]
    return back.astype(np.float32)


def config(kind, **settings):
    return OptimizationConfig(global_config=kind(weight_threshold=1, **settings))


def pruned(model, joint=False, **settings):
    return weights_of(prune_weights(model, config(OpMagnitudePrunerConfig, **settings), joint_compression=joint))


def zeros(weights):
    return float(np.mean(weights == 0))


print(f"coremltools {version('coremltools')}")
normal = generator.normal(size=(SIZE, SIZE)).astype(np.float32)
quantized = {
    "8 bits": linear_quantize_weights(layer(normal), config(OpLinearQuantizerConfig, dtype="int8", granularity="per_tensor")),
    "4 bits": linear_quantize_weights(layer(normal), config(OpLinearQuantizerConfig, dtype="int4", granularity="per_tensor")),
    "palette of 8": palettize_weights(layer(normal), config(OpPalettizerConfig, mode="uniform", nbits=3)),
    "one size, two signs": palettize_weights(layer(np.sign(normal)), config(OpPalettizerConfig, mode="unique")),
}
for name, model in quantized.items():
    weights = weights_of(model)
    for share in (0.25, 0.5, 0.75):
        found, plain = zeros(pruned(model, True, target_sparsity=share)), zeros(pruned(layer(normal), target_sparsity=share))
        sizes, count = np.unique(np.abs(weights), return_counts=True)
        print(f"{name}, target_sparsity={share}: {found:.1%} pruned, of float weights {plain:.1%}")
        assert abs(plain - share) < 0.001 and found > share - 0.001, changed
        if name != "8 bits":
            first = int(np.searchsorted(np.cumsum(count), share * weights.size))
            assert found == count[: first + 1].sum() / weights.size, changed
    shares = dict(zip(sizes.round(2).tolist(), (count / weights.size).round(3).tolist(), strict=True))
    print(f"  share of each size: {shares if len(sizes) < 9 else 'many sizes'}")

for size in (0.02, 0.001, 0.0003, 0.0001, 0.00001):
    weights = (normal * size).astype(np.float16).astype(np.float32)
    left = {}
    for name, precision in (("float16", ct.precision.FLOAT16), ("float32", ct.precision.FLOAT32)):
        for rule, settings in (("single weights", {}), ("blocks of 4", {"block_size": 4})):
            left[name, rule] = zeros(pruned(layer(weights, precision), target_sparsity=0.5, **settings))
    print(f"standard deviation {size}: " + ", ".join(f"{rule} of a {name} model {share:.1%}" for (name, rule), share in left.items()))
    for (name, rule), share in left.items():
        assert (share > 0.55) == (name == "float16" and rule == "blocks of 4" and size < 0.001), changed
PYTHON
