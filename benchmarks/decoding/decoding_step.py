"""Where a step of a decoder in ONNX Runtime spends its time, and what other settings of the session make of it.

    python benchmarks/decoding/decoding_step.py FOLDER [--past 32] [--streams 1] [--turns 10] [--steps 24]

FOLDER holds model.onnx of `onnxruntime_decoder` (`onnx-decoder` in a build of an export, or what `benchmarks/generation.py` wrote).

Prints milliseconds of a step by kind of node from ONNX Runtime's own profiler, which adds 2 to 3 us to each node: products by the layers
that they merge, everything else by its operator. Then the settings of `VARIANTS`, each in a process of its own, take turns of `--steps`
steps; a ratio is formed within a turn, with its 95 % interval (foundation/measure/turns.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np

from export.engines.onnxruntime_decoder import properties
from foundation.machine.process import TUNABLES, environment
from foundation.measure.turns import half_width
from foundation.standalone import onnx_decoder
from foundation.standalone.onnx_decoder import OnnxDecoder, Texts

WARM_UP = 4
THREADS = 2


@dataclass(frozen=True)
class Variant:
    """Settings that are compared with the engine's own."""

    properties: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


VARIANTS = {
    "as it is": Variant(),
    "one thread": Variant({"intra_op_num_threads": "1"}),
    "threads that sleep": Variant({"session.intra_op.allow_spinning": "0"}),
    "huge pages": Variant(environment={"GLIBC_TUNABLES": f"{TUNABLES}:glibc.malloc.hugetlb=1"}),
    "no flash attention": Variant(environment={"ORT_GQA_DISABLE_FLASH_ATTENTION": "1"}),
}


def main() -> None:
    """Profiles, compares, prints; or answers as the process of one variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the engine")
    parser.add_argument("--past", type=int, default=32, help="tokens of each text before the steps")
    parser.add_argument("--streams", type=int, default=1, help="texts")
    parser.add_argument("--turns", type=int, default=10, help="turns of each variant; 0: the profile alone")
    parser.add_argument("--steps", type=int, default=24, help="steps of a turn")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant is not None:
        serve(arguments)
        return
    profile(arguments)
    if arguments.turns:
        compare(arguments)


def begun(arguments: argparse.Namespace, more: Mapping[str, str]) -> Texts:
    """Opens the engine and reads the texts."""
    texts = OnnxDecoder(arguments.folder / "model.onnx", {**properties(THREADS), **more}).texts()
    random = np.random.default_rng(0)
    texts.read([random.integers(0, 1000, arguments.past) for _ in range(arguments.streams)])
    return texts


def step_ms(texts: Texts, past: int, steps: int) -> float:
    """Returns the median time of a step, ms; the texts start from their first `past` tokens."""
    texts.lengths = [past] * len(texts.lengths)
    tokens, found = np.zeros(len(texts.lengths), np.int64), []
    for _ in range(WARM_UP + steps):
        started = time.perf_counter()
        texts.step(tokens).argmax(axis=1)
        found.append(1e3 * (time.perf_counter() - started))
    return float(np.median(found[WARM_UP:]))


def profile(arguments: argparse.Namespace) -> None:
    """Prints the time of a step by kind of node."""
    made = onnx_decoder.session_options

    with tempfile.TemporaryDirectory() as folder:

        def profiled(given: Mapping[str, str]) -> object:
            options = made(given)
            options.enable_profiling, options.profile_file_prefix = True, str(Path(folder, "profile"))
            return options

        with mock.patch.object(onnx_decoder, "session_options", profiled):
            texts = begun(arguments, {})
        step_ms(texts, arguments.past, arguments.steps)
        events = json.loads(Path(texts._decoder.session.end_profiling()).read_text(encoding="utf-8"))
    runs = sorted(event["ts"] for event in events if event["name"] == "model_run")[-arguments.steps :]
    spent: Counter[str] = Counter()
    nodes: Counter[str] = Counter()
    for event in events:
        if event["name"].endswith("_kernel_time") and event["ts"] >= runs[0]:
            kind = kind_of(event["name"].removesuffix("_kernel_time"), event["args"]["op_name"])
            spent[kind] += event["dur"]
            nodes[kind] += 1
    total = sum(spent.values())
    print(f"| {arguments.streams} x {arguments.past} | ms of a step | share | nodes | us of a node |\n| --- | ---: | ---: | ---: | ---: |")
    for kind, time_us in spent.most_common():
        count = nodes[kind] / len(runs)
        print(f"| {kind} | {time_us / len(runs) / 1e3:.3f} | {time_us / total:.1%} | {count:.0f} | {time_us / nodes[kind]:.1f} |")
    print(f"| all nodes | {total / len(runs) / 1e3:.3f} | | {sum(nodes.values()) / len(runs):.0f} | |\n")


def kind_of(name: str, operator: str) -> str:
    """Returns the kind of a node: the layers of a product, without the block that they are in, or the operator."""
    if not operator.startswith("MatMul"):
        return operator
    return f"{operator} " + "+".join(layer.rpartition(".")[2] for layer in name.split("+"))


def serve(arguments: argparse.Namespace) -> None:
    """Measures a turn for each line of the input."""
    texts = begun(arguments, VARIANTS[arguments.variant].properties)
    print("open", flush=True)
    for _ in sys.stdin:
        print(step_ms(texts, arguments.past, arguments.steps), flush=True)


def compare(arguments: argparse.Namespace) -> None:
    """Lets the variants take turns; prints their times and ratios."""
    own = [sys.executable, __file__, str(arguments.folder)]
    own += [f"--{name}={getattr(arguments, name)}" for name in ("past", "streams", "steps")]
    processes = {
        name: subprocess.Popen(
            [*own, "--variant", name],
            env={**environment(), **variant.environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, variant in VARIANTS.items()
    }
    times: dict[str, list[float]] = {name: [] for name in processes}
    for process in processes.values():
        read(process)
    for turn in range(arguments.turns):
        for name in list(processes)[:: 1 if turn % 2 else -1]:
            print("turn", file=processes[name].stdin, flush=True)
            times[name].append(float(read(processes[name])))
    for process in processes.values():
        process.communicate()
    print(f"| {arguments.streams} x {arguments.past}, {arguments.turns} turns | ms | speed over the first |\n| --- | ---: | --- |")
    first, *_ = times.values()
    for name, found in times.items():
        print(f"| {name} | {np.median(found):.2f} | {ratio(first, found)} |")


def read(process: subprocess.Popen[str]) -> str:
    """Returns the next line of a process."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a process ended with status {process.wait()}")
    return line


def ratio(slow: Sequence[float], fast: Sequence[float]) -> str:
    """Returns the mean ratio of two within turns, and its 95 % interval."""
    logarithms = [math.log(one / other) for one, other in zip(slow, fast, strict=True)]
    mean, half = float(np.mean(logarithms)), half_width(logarithms)
    value, low, high = (math.exp(mean + shift) for shift in (0.0, -half, half))
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
