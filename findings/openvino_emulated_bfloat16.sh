#!/usr/bin/env bash
# OpenVINO 2026.4.1: on a CPU with AVX-512 and without bfloat16 arithmetic, INFERENCE_PRECISION_HINT=bf16 is emulated, tens of times slower than float32.
# The guess was that a precision which OPTIMIZATION_CAPABILITIES does not name is not computed in: the plugin takes float32 then, as it does on a CPU with
# AVX2 alone.
#
# Seen (2026-12-01, Intel Xeon of the Ice Lake class, AVX-512 VNNI, 2 threads): BF16 is not among the capabilities. The compiled model reports bfloat16 all the
# same, and computes in it: numbers are off by as much as bfloat16 makes them. A product of 512 x 1024 x 1024 takes 235 ms where float32 takes 7. So a model that
# was built for bfloat16 on a newer machine is right, and useless, on an older one. Nothing warns. With f32, or without a hint, it is fast. Nothing can be
# seen on a CPU that has bfloat16, or that has no AVX-512; the script says so and ends.
set -euo pipefail
flags=$(grep -m 1 '^flags' /proc/cpuinfo)
if [[ $flags != *avx512f* || $flags == *avx512_bf16* || $flags == *amx_bf16* ]]; then
    echo "nothing to see: this needs a CPU with AVX-512 and without bfloat16 arithmetic"
    exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq openvino==2026.4.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import statistics
import time
from importlib.metadata import version

import numpy as np
import openvino
from openvino import opset13

generator = np.random.default_rng(0)
weights, x = (generator.standard_normal(shape).astype(np.float32) for shape in ((1024, 1024), (512, 1024)))
given = opset13.parameter([512, 1024], np.float32)
model = openvino.Model([opset13.matmul(given, opset13.constant(weights), False, False)], [given])
core, right = openvino.Core(), x.astype(np.float64) @ weights
print(f"openvino {version('openvino')}; the CPU can do {core.get_property('CPU', 'OPTIMIZATION_CAPABILITIES')}")
milliseconds, error = {}, {}
for hint in (None, "f32", "bf16"):
    compiled = core.compile_model(model, "CPU", {} if hint is None else {"INFERENCE_PRECISION_HINT": hint})
    request, times = compiled.create_infer_request(), []
    for _ in range(12):
        start = time.perf_counter()
        answer = request.infer([x])[0]
        times.append(1000 * (time.perf_counter() - start))
    milliseconds[hint], error[hint] = statistics.median(times), float(np.linalg.norm(answer - right) / np.linalg.norm(right))
    reported = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    print(f"hint {hint}: reports {reported}, off by {error[hint]:.1e}, {milliseconds[hint]:.1f} ms")
changed = "the behaviour has changed"
assert "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"), changed
assert reported == "bf16" and error["bf16"] > 1e-3 and max(error[None], error["f32"]) < 1e-5, changed
assert milliseconds["bf16"] > 5 * max(milliseconds[None], milliseconds["f32"]), changed
PYTHON
