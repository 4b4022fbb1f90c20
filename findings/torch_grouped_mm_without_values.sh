#!/usr/bin/env bash
# torch 2.13.0, transformers 5.23.0: a training step of a mixture of experts runs, and cannot be run on tensors without values.
# The guess was that a product that a device computes can be traced by FakeTensorMode, with the types of its result, so that the memory of a
# training can be counted, or the step be compiled and exported, before there are weights.
#
# Seen (2026-12-01): grouped_mm multiplies float32 on a CPU, and its answer is exact. On fake and meta tensors the same call ends in "Expected inputs
# of BF16 type": the function that gives the shape of the result checks what one kernel of a GPU asks for. bfloat16 works in both. Mixtral uses
# this product unless it is told otherwise, so that its forward pass works with values, in float32, and not without. The same model runs
# without values with the experts implementations "eager" (not either: it looks at values) and "batched_mm" (yes, and gathers the weights of an
# expert for every token, so that it counts many times the memory).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 numpy==2.4.6 transformers==5.23.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON' 2>"$folder/log" || { tail -30 "$folder/log"; exit 1; }
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MixtralConfig, MixtralForCausalLM

print(f"seen: torch {torch.__version__}, transformers {transformers.__version__}")


def product(dtype):
    """Two groups of rows by two matrices."""
    rows, weights = torch.ones(4, 16, dtype=dtype), torch.ones(2, 16, 16, dtype=dtype)
    return torch.nn.functional.grouped_mm(rows, weights, offs=torch.tensor([1, 4], dtype=torch.int32))


def told(work):
    """"runs", or the line of an error."""
    try:
        work()
    except RuntimeError as error:
        return str(error).splitlines()[0][:40]
    return "runs"


def step(implementation, fake):
    """A training step of a small mixture."""
    config = MixtralConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                           num_key_value_heads=2, num_local_experts=4)  # fmt: skip
    config._experts_implementation = implementation

    def run():
        model = MixtralForCausalLM(config)
        model(input_ids=torch.ones(2, 8, dtype=torch.int64), use_cache=False).logits.sum().backward()

    if not fake:
        return told(run)
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            return told(run)
        except Exception as error:
            return type(error).__name__


assert bool((product(torch.float32) == 16).all())
found = {}
for dtype in (torch.float32, torch.bfloat16):
    with FakeTensorMode(allow_non_fake_inputs=True):
        found[f"fake {dtype}"] = told(lambda: product(dtype))
    found[f"real {dtype}"] = told(lambda: product(dtype))
for implementation in ("grouped_mm", "batched_mm", "eager"):
    found[f"mixture with values, {implementation}"] = step(implementation, False)
    found[f"mixture without values, {implementation}"] = step(implementation, True)
for name, value in found.items():
    print(f"seen: {name}: {value}")
assert found["fake torch.float32"].startswith("Expected inputs of BF16"), found
assert [found[f"real {dtype}"] for dtype in (torch.float32, torch.bfloat16)] == ["runs", "runs"]
assert found["fake torch.bfloat16"] == "runs"
assert all(found[f"mixture with values, {name}"] == "runs" for name in ("grouped_mm", "batched_mm", "eager"))
assert found["mixture without values, grouped_mm"].startswith("Expected inputs of BF16")
assert found["mixture without values, batched_mm"] == "runs"
assert found["mixture without values, eager"] != "runs"
PYTHON
