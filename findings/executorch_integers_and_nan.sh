#!/usr/bin/env bash
# executorch 1.5.1, torch 2.13.0, CPU: the remainder of negative integers has the other sign, and XNNPACK's maximum loses a NaN that stands first.
# The guess was that an exported program answers as the module that was exported, up to rounding, or is refused.
#
# Seen (2026-12-01): torch's % and torch.remainder follow the sign of the divisor, also for integers: -7 % 3 is 2. The portable kernel gives
# -1 for -7 % 3 and 1 for 7 % -3, as C does, with a number or a tensor behind it. Positions that wrap around (roll, relative positions, windows of
# a shifted attention) are then negative indices. torch.maximum of (NaN, 1) and (1, NaN) is NaN both times, and so is the portable kernel's; the delegate
# XNNPACK gives 1 and NaN.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 executorch==1.5.1
export OMP_NUM_THREADS=1
"$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" | grep "^seen: " | cut -c 7- || { tail -30 "$folder/log"; exit 1; }
from importlib.metadata import version

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime

changed = "the behaviour has changed"
runtime = Runtime.get()
tell = lambda text: print(f"\nseen: {text}", flush=True)  # noqa: E731
tell(f"executorch {version('executorch')}, torch {torch.__version__}")


class Module(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def answer(function, inputs, xnnpack):
    """What the exported program answers, as a list."""
    program = torch.export.export(Module(function).eval(), inputs)
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()] if xnnpack else [])
    loaded = runtime.load_program(lowered.to_executorch().buffer)
    return loaded.load_method("forward").execute(list(inputs))[0].tolist()


numbers = torch.arange(-4, 5)
for name, function, inputs in (
    ("% 3", lambda a: a % 3, (numbers,)),
    ("% -3", lambda a: a % -3, (numbers,)),
    ("torch.remainder of tensors, 3", torch.remainder, (numbers, torch.full_like(numbers, 3))),
):
    got, want = answer(function, inputs, False), function(*inputs).tolist()
    tell(f"{numbers.tolist()} {name}: executorch {got}, torch {want}")
    assert got == torch.fmod(numbers, 3).tolist() != want, changed

first, second = torch.tensor([float("nan"), 1.0, 2.0]), torch.tensor([1.0, float("nan"), 3.0])
for xnnpack in (False, True):
    got, want = answer(torch.maximum, (first, second), xnnpack), torch.maximum(first, second).tolist()
    tell(f"maximum of {first.tolist()} and {second.tolist()}, {'XNNPACK' if xnnpack else 'portable'}: {got}, torch {want}")
    assert str(want) == "[nan, nan, 3.0]" and str(got) == ("[1.0, nan, 3.0]" if xnnpack else str(want)), changed
PYTHON
