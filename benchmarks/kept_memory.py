"""What freed memory costs where it is kept and where it is returned: training steps on batches of many lengths, on the CPU.

    python benchmarks/kept_memory.py [--steps 40] [--rows 16] [--left 2048]

A BERT of the size of MiniLM-L6 with random weights, on rows of 90 to 240 random tokens, each way in a process of its own:

    glibc       as the C library does by itself
    returned    everything is returned after each step
    kept        everything is kept (`foundation.machine.process.keep_freed_memory`)
    if short    kept, and returned once more is held than is left (`return_memory_if_short`); --left MiB stand for the machine's

Prints the seconds of the later half of the steps and the largest resident size.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time

import torch
from transformers import BertConfig, BertForQuestionAnswering

from foundation.machine import process
from foundation.machine.environment import fingerprint

WAYS = ("glibc", "returned", "kept", "if short")
WIDTH, LAYERS, HEADS, NEURONS, WORDS = 384, 6, 12, 1536, 3000


def main() -> None:
    """Runs each way, and prints a table."""
    given = parse()
    if given.way:
        print(json.dumps(trained(given)))
        return
    print(fingerprint())
    print(f"{given.steps} steps of {given.rows} rows, {given.left} MiB left")
    print("| freed memory | s/step, later half | peak MiB |\n| --- | --- | --- |")
    for way in WAYS:
        ran = subprocess.run([sys.executable, *sys.argv, "--way", way], check=True, capture_output=True, text=True)
        seconds, peak = json.loads(ran.stdout.splitlines()[-1])
        print(f"| {way} | {seconds:.2f} | {peak:,.0f} |", flush=True)


def parse() -> argparse.Namespace:
    """Returns the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--left", type=int, default=2048, help="MiB that the machine is said to have left")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def trained(given: argparse.Namespace) -> tuple[float, float]:
    """Returns the seconds of a step in the later half, and the peak in MiB."""
    if given.way in ("kept", "if short"):
        process.keep_freed_memory()
    process.available_memory_bytes = lambda: given.left << 20  # type: ignore[assignment]
    torch.manual_seed(0)
    lengths = random.Random(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": NEURONS}
    model = BertForQuestionAnswering(BertConfig(vocab_size=WORDS, **sizes)).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(given.steps):
        if step == given.steps // 2:
            began = time.monotonic()
        tokens = torch.randint(0, WORDS, (given.rows, lengths.randint(90, 240)))
        with torch.autocast("cpu", torch.bfloat16):
            answers = model(input_ids=tokens)
        (answers.start_logits.float().square().mean() + answers.end_logits.float().square().mean()).backward()
        del answers
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if given.way == "returned":
            process.trim_memory()
        if given.way == "if short":
            process.return_memory_if_short()
    return (time.monotonic() - began) / (given.steps - given.steps // 2), process.peak_memory_bytes() / 2**20


if __name__ == "__main__":
    main()
