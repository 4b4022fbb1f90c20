"""Sequences per second of BERT-large in int8 on packed rows, as long as those of SQuAD: what MLPerf's task `bert-99` (offline) counts.

    lengths     `squad_lengths.json`: how many of 1,219 rows of SQuAD v1.1 dev have so many tokens; drawn anew, in any order
    batches     rows one after another until a batch has no room: `TOKENS` tokens, `SEQUENCES` rows
    a round     all batches: copied to the GPU, one CUDA graph each, logits copied back; the host's clock, after a warm-up

The weights are random, which costs the same time as trained ones. A few rows are answered alone, too, and have to have the same logits.

MLPerf's model has two logits for each token, ours two for each row from its first: 0.001 % of the operations. Rows are tokenized and packed
before the clock starts; MLPerf holds them tokenized, too.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from export.fused.forward import Encoder
from export.fused.graphs import Graphs, Record, Size
from export.fused.layers import Tiles
from export.fused.linears import FloatLinear, Int8Linear
from export.fused.plan import Block, Head, Plan
from export.fused.rows import Rows, filled, pack
from export.kernels.epilogue import Int8Weight
from export.kernels.norm import Norm

LENGTHS = Path(__file__).with_name("squad_lengths.json")
TOKENS, SEQUENCES = 16384, 128
QUERIES, ROUNDS, ALONE = 10_833, 3, 4
"""Rows of a round, as many as MLPerf's; rounds; rows that are answered alone, too."""
TOLERANCE = 1e-2
"""Of logits: the states of a row have the same bits in any batch, the float layers of the head may add up in another order."""


@dataclass(frozen=True)
class Bert:
    """A BERT."""

    width: int = 1024
    inner: int = 4096
    layers: int = 24
    heads: int = 16
    words: int = 30522
    positions: int = 512


def squad_lengths(count: int, seed: int = 0) -> list[int]:
    """Returns the tokens of so many rows, drawn from `squad_lengths.json`."""
    known = json.loads(LENGTHS.read_text(encoding="utf-8"))["lengths"]
    sizes, counts = np.array(list(map(int, known))), np.array(list(known.values()))
    return [int(length) for length in np.random.default_rng(seed).choice(sizes, count, p=counts / counts.sum())]


def batches_of(lengths: Sequence[int], tokens: int = TOKENS, sequences: int = SEQUENCES) -> list[list[int]]:
    """Returns the rows of each batch by their numbers: a batch ends where the next row has no room.

    Args:
        lengths: Tokens of each row, at most `tokens`.
        tokens: Most tokens of a batch.
        sequences: Most rows of a batch.
    """
    found: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths):
        if length > room or len(found[-1]) == sequences:
            found.append([])
            room = tokens
        found[-1].append(number)
        room -= length
    return found


def random_plan(bert: Bert, device: str | torch.device, seed: int = 0) -> Plan:
    """Returns a BERT of random weights in int8, whose numbers stay in range; its head is float, as a rule of ours."""
    random = torch.Generator(device).manual_seed(seed)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device) * 0.05

    def int8(name: str, outputs: int, inputs: int, input_scale: float) -> Int8Linear:
        codes = torch.randint(-127, 128, (outputs, inputs), generator=random, dtype=torch.int8, device=device)
        # products of codes with a spread of 1 / input_scale and of 73: outputs get a spread of about 1
        scale = torch.full((outputs,), 1 / (73 * inputs**0.5), device=device)
        return Int8Linear(name, Int8Weight(codes, scale, floats(outputs)), input_scale)

    def norm() -> Norm:
        return Norm(1 + floats(bert.width), floats(bert.width), 1e-12)

    def block(number: int) -> Block:
        query, key, value = (int8(f"{number}.{name}", bert.width, bert.width, 0.03) for name in ("query", "key", "value"))
        out = int8(f"{number}.out", bert.width, bert.width, 0.02)
        up, down = int8(f"{number}.up", bert.inner, bert.width, 0.03), int8(f"{number}.down", bert.width, bert.inner, 0.02)
        dimension = bert.width // bert.heads
        return Block(query, key, value, out, up, down, dimension, dimension**-0.5, norm(), norm())

    tables = (floats(bert.words, bert.width), floats(2, bert.width), floats(bert.positions, bert.width))
    blocks = tuple(block(number) for number in range(bert.layers))
    pooler, classifier = FloatLinear("pooler", floats(bert.width, bert.width), None), FloatLinear("classifier", floats(2, bert.width), None)
    return Plan(*tables, norm(), bert.positions, "gelu", blocks, Head(((pooler, "tanh"), (classifier, "none"))), {})


@dataclass(frozen=True)
class Machine:
    """What a round runs on."""

    device: torch.device
    record: Record
    """Records a pass."""
    wait: Callable[[], None]
    """Waits for the device."""
    tiles: Tiles | None = None
    dtype: torch.dtype = torch.float16
    clock: Callable[[], float] = time.perf_counter


def packed_rate(plan: Plan, lengths: Sequence[int], machine: Machine, tokens: int = TOKENS, sequences: int = SEQUENCES) -> dict[str, Any]:
    """Returns how many rows per second a model answers.

    Args:
        plan: The model.
        lengths: Tokens of each row.
        machine: Where.
        tokens: Most tokens of a batch.
        sequences: Most rows of a batch.

    Returns:
        `sequences_per_s` (median of the rounds), `rounds` (each of them), `sequences`, `batches`, `mean_tokens`, `filled` (share of the
        room of the batches), and `difference`, the largest between logits of a row alone and in its batch.
    """
    encoder = Encoder(plan, machine.device, machine.dtype, machine.tiles)
    random = np.random.default_rng(0)
    ids = [random.integers(0, len(plan.word), length) for length in lengths]
    batches = [packed([ids[row] for row in batch], encoder) for batch in batches_of(lengths, tokens, sequences)]
    graphs = Graphs(encoder.forward, (Size(tokens, sequences),), machine.device, machine.record)
    with torch.inference_mode():
        first = graphs(batches[0]).cpu().clone()  # compiles, measures tiles, records: not timed
        rounds = [len(lengths) / _round(batches, graphs, machine) for _ in range(ROUNDS)]
        alone = [encoder.forward(filled_alone(ids[row], encoder).to(machine.device)).cpu()[0] for row in range(min(ALONE, len(first)))]
    difference = max(float((one - first[row]).abs().max()) for row, one in enumerate(alone))
    return {
        "sequences_per_s": round(statistics.median(rounds), 1),
        "rounds": [round(rate, 1) for rate in rounds],
        "sequences": len(lengths),
        "batches": len(batches),
        "mean_tokens": round(sum(lengths) / len(lengths), 2),
        "filled": round(sum(lengths) / (tokens * len(batches)), 4),
        "difference": difference,
    }


def packed(ids: Sequence[np.ndarray], encoder: Encoder) -> Rows:
    """Returns rows one after another, on the CPU."""
    longest = max(map(len, ids))
    padded = np.stack([np.pad(row, (0, longest - len(row))) for row in ids])
    mask = np.stack([np.arange(longest) < len(row) for row in ids]).astype(np.int64)
    return pack({"input_ids": padded, "attention_mask": mask}, encoder.limits)


def filled_alone(ids: np.ndarray, encoder: Encoder) -> Rows:
    """Returns a row by itself."""
    rows = packed([ids], encoder)
    return filled(rows, len(rows.word), 1)


def _round(batches: Sequence[Rows], graphs: Graphs, machine: Machine) -> float:
    """Returns the seconds of all batches, from rows on the host to logits on the host."""
    machine.wait()
    began = machine.clock()
    for batch in batches:
        graphs(batch).cpu()
    machine.wait()
    return machine.clock() - began
