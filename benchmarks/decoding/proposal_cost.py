"""Which share of proposed tokens a decoder has to accept before proposals pay, from the times of its own steps.

    python benchmarks/decoding/proposal_cost.py FOLDER [--draft FOLDER] [--past 32] [--turns 10] [--steps 24] [--at-once 1 2 3 4 7]

FOLDER and that of the draft hold model.onnx of `onnxruntime_decoder`. A step checks k proposed tokens together with the last one. With t_n
the time of a step of n tokens of one text, d the time of a step of the draft (0 for prompt look-up) and a the probability that a proposed
token is accepted:

    tokens per step   E = 1 + a + ... + a^k
    speed             E t_1 / (t_{k+1} + k d)

Prints t_n, the least a with a speed of 1, and the speed at a = 1, beyond which no draft can get. Sizes take turns; all times are medians.
Source: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, section 3.3.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from export.engines.onnxruntime_decoder import properties
from foundation.standalone.onnx_decoder import OnnxDecoder

THREADS = 2
WARM_UP = 4


def main() -> None:
    """Times steps, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the engine")
    parser.add_argument("--draft", type=Path, help="folder of the draft's engine; without one, proposals cost nothing")
    parser.add_argument("--past", type=int, default=32, help="tokens of the text before the steps")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=24, help="steps of a turn")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 3, 4, 7], help="tokens that are proposed at once")
    arguments = parser.parse_args()
    model = OnnxDecoder(arguments.folder / "model.onnx", properties(THREADS))
    draft = OnnxDecoder(arguments.draft / "model.onnx", properties(THREADS)) if arguments.draft else None
    sizes = [1, *(count + 1 for count in arguments.at_once)]
    times: dict[int, list[float]] = {size: [] for size in sizes}
    of_draft = [0.0]
    for turn in range(arguments.turns):
        for size in sizes[:: 1 if turn % 2 else -1]:
            times[size].append(step_ms(model, size, arguments.past, arguments.steps))
        if draft is not None:
            of_draft = [*(of_draft if turn else []), step_ms(draft, 1, arguments.past, arguments.steps)]
    alone, proposed = float(np.median(times[1])), float(np.median(of_draft))
    print(f"a step of one token {alone:.2f} ms, of the draft {proposed:.2f} ms; {arguments.turns} turns of {arguments.steps} steps\n")
    print("| proposed at once | ms of a step | over one token | acceptance from which it pays | speed if all are accepted |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for count in arguments.at_once:
        checked = float(np.median(times[count + 1]))
        step = checked + count * proposed
        least = break_even(count, step / alone)
        pays = "never" if least is None else f"{least:.0%}"
        print(f"| {count} | {checked:.2f} | {checked / alone:.2f} | {pays} | {(count + 1) * alone / step:.2f} |")


def step_ms(decoder: OnnxDecoder, tokens: int, past: int, steps: int) -> float:
    """Returns the median time of a step of so many tokens of one text, ms, with the choice of all tokens."""
    random, found = np.random.default_rng(0), []
    texts = decoder.texts()
    texts.read([random.integers(0, decoder.vocabulary, past)])
    given = random.integers(0, decoder.vocabulary, (1, tokens))
    for _ in range(WARM_UP + steps):
        texts.lengths = [past]
        started = time.perf_counter()
        texts.forward(given).argmax(axis=-1)
        found.append(1e3 * (time.perf_counter() - started))
    return float(np.median(found[WARM_UP:]))


def break_even(count: int, cost: float) -> float | None:
    """Returns the least probability of acceptance with which a step is worth its cost; None where even certainty is not.

    Args:
        count: Tokens that are proposed at once.
        cost: Time of the step over the time of a step of one token.
    """
    if cost > count + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**power for power in range(count + 1)) < cost else (low, middle)
    return high


if __name__ == "__main__":
    main()
