"""Compares the cost of one optimizer step: finetuning, quantization-aware training in int8, and training with torch's fake quantization.

    python benchmarks/qat_step.py [--model FOLDER] [--batch 32] [--sequence 128] [--turns 4] [--steps 8] [--threads N]

FOLDER holds a fine-tuned text classifier; without it MiniLM-L6-H384 is built with random weights. The step is that of
foundation/training/train.py: autocast (bfloat16 where the processor multiplies it), forward, cross entropy, backward, clipping, AdamW;
random tokens, no padding, no teacher. Fake quantization is what torch users write: fake_quantize of input and weight with the same scales,
then the float product. Every kind has its own process; they take turns, warm-up steps are discarded, ratios are of medians. Prints
hardware, versions and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from foundation.machine.environment import fingerprint, physical_cores
from foundation.machine.process import environment, spawn

KINDS = {"finetune": "finetuning", "qat": "QAT, true int8 (LSQ)", "fake": "torch fake quantization"}
WARM_UP = 3
BITS, LARGEST = 8, 127


def main() -> None:
    """Measures all kinds in turns, or serves as the process of one of them."""
    arguments = parse()
    if arguments.kind:
        serve(arguments)
        return
    with ExitStack() as stack:
        command = [sys.executable, __file__, *sys.argv[1:], "--kind"]
        env = environment(OMP_NUM_THREADS=str(arguments.threads), HF_HUB_OFFLINE="1")
        processes = {kind: spawn([*command, kind], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for kind in KINDS}
        for process in processes.values():
            stack.callback(process.kill)
        samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
        autocast = {kind: ask(process, WARM_UP)["autocast"] for kind, process in processes.items()}
        for _ in range(arguments.turns):
            for kind, process in processes.items():
                samples[kind] += ask(process, arguments.steps)["ms"]
    found = fingerprint()
    print(f"{found['hardware']['cpu']}, {arguments.threads} threads, torch {found['versions']['torch']}, autocast {autocast['finetune']}")
    print(f"{arguments.model or 'MiniLM-L6-H384, random weights'}, {arguments.batch} rows of {arguments.sequence} tokens\n")
    print(table(samples))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="fine-tuned checkpoint")
    parser.add_argument("--batch", type=int, default=32, help="rows of a step")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a row")
    parser.add_argument("--turns", type=int, default=4, help="turns of every kind")
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn")
    parser.add_argument("--threads", type=int, default=physical_cores(), help="threads of torch")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    return parser.parse_args()


def ask(process: subprocess.Popen[bytes], steps: int) -> dict[str, Any]:
    """Has a process take some steps; returns what it says of them."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"%d\n" % steps)
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def serve(arguments: argparse.Namespace) -> None:
    """Takes as many steps as each line of the standard input says, and answers with their times."""
    import torch

    from foundation.training.precision import autocast_dtype

    step = stepper(arguments)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        print(json.dumps({"ms": times, "autocast": str(autocast_dtype(torch.device("cpu")))}), flush=True)


def stepper(arguments: argparse.Namespace) -> Callable[[], None]:
    """Returns one step of training as a function."""
    import torch
    from torch import nn
    from transformers import AutoModelForSequenceClassification, BertConfig

    from foundation.models.checkpoint import load
    from foundation.models.forward import forward
    from foundation.training.optimizers import parameter_groups
    from foundation.training.precision import autocast_dtype

    torch.manual_seed(0)
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    model = load(arguments.model) if arguments.model else AutoModelForSequenceClassification.from_config(config)
    shape = (arguments.batch, arguments.sequence)
    features = {"input_ids": torch.randint(1000, 20000, shape), "attention_mask": torch.ones(shape, dtype=torch.int64)}
    labels = torch.randint(0, 2, shape[:1])
    prepare(model, features, arguments.kind)
    model.train()
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), lr=1e-5, fused=True)
    autocast = autocast_dtype(torch.device("cpu"))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast == torch.bfloat16):
            loss = nn.functional.cross_entropy(forward(model, features), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def prepare(model: Any, features: dict[str, Any], kind: str) -> None:
    """Calibrates the linear layers of the encoder by the largest input of the batch, and replaces them by those of `kind`."""
    import torch

    from foundation.models.forward import forward, linears
    from foundation.schemes.int8 import LayerScales, weight_scale
    from quantize.calibration import Histogram, collect
    from quantize.training.qat import insert

    if kind == "finetune":
        return
    layers = {name: layer for name, layer in linears(model).items() if ".encoder." in name}
    observed = collect(model.eval(), layers, [features], forward, Histogram)
    scales = {
        name: LayerScales(weight_scale(layer.weight.detach(), LARGEST), torch.tensor(observed.of(name).largest / LARGEST), BITS)
        for name, layer in layers.items()
    }
    if kind == "qat":
        insert(model, scales, observed.group)
        return
    for name, layer in layers.items():
        layer.forward = fake_quantized(layer, scales[name])


def fake_quantized(layer: Any, scales: Any) -> Callable[[Any], Any]:
    """Returns the forward of a layer whose input and weight go through torch's fake quantization, as its QAT does it."""
    import torch

    zero_O = torch.zeros(layer.out_features, dtype=torch.int32)
    input_scale = float(scales.input_scale)

    def forward(x: Any) -> Any:
        x = torch.fake_quantize_per_tensor_affine(x.float(), input_scale, 0, -128, 127)
        weight = torch.fake_quantize_per_channel_affine(layer.weight, scales.weight_scale, zero_O, 0, -LARGEST, LARGEST)
        return torch.nn.functional.linear(x, weight, layer.bias)

    return forward


def table(samples: dict[str, list[float]]) -> str:
    """Returns the times as a Markdown table."""
    base = float(np.median(samples["finetune"]))
    lines = ["| step | p50 ms | p90 ms | n | against finetuning |", "| --- | --- | --- | --- | --- |"]
    for kind, values in samples.items():
        p50, p90 = np.percentile(values, (50, 90))
        lines.append(f"| {KINDS[kind]} | {p50:.1f} | {p90:.1f} | {len(values)} | {p50 / base:.2f}x |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
