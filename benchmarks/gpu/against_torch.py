"""BERT-large in int8 on our kernels beside the same model in torch, fp16, eager, in turns on one GPU.

    ours     rows of one length, packed, one CUDA graph
    eager    Transformers' BertForSequenceClassification with random weights, attention by torch's kernel (sdpa), nothing padded

Both begin with rows on the GPU; the time is that of the GPU's events, so that of torch has the gaps in which the GPU waits for the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu.squad import Bert, Machine, packed
from benchmarks.gpu.timing import Gpu, in_turns
from export.fused.forward import Encoder
from export.fused.graphs import Recording
from export.fused.plan import Plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPES = ((1, 128), (32, 128), (32, 384))
"""(rows, tokens)."""


def compare_with_torch(
    plan: Plan, bert: Bert, machine: Machine, gpu: Gpu, shapes: Sequence[tuple[int, int]] = SHAPES
) -> list[dict[str, Any]]:
    """Times both at every shape.

    Args:
        plan: Our model.
        bert: Its sizes.
        machine: Where.
        gpu: Takes the times.
        shapes: (rows, tokens).

    Returns:
        `batch`, `sequence`, `ours_ms` and `eager_ms` (medians), and `speedup`.
    """
    encoder = Encoder(plan, machine.device, machine.dtype, machine.tiles)
    eager = eager_bert(bert, machine.device, machine.dtype)
    found = []
    for batch, sequence in shapes:
        ids = np.random.default_rng(0).integers(0, bert.words, (batch, sequence))
        with torch.inference_mode():
            works = {"ours": _recorded(encoder, ids, machine).replay, "eager": _eager(eager, ids, machine)}
            times = {name: statistics.median(ms) for name, ms in in_turns(works, gpu).items()}
        speedup = round(times["eager"] / times["ours"], 4)
        ours, other = round(times["ours"], 5), round(times["eager"], 5)
        found.append({"batch": batch, "sequence": sequence, "ours_ms": ours, "eager_ms": other, "speedup": speedup})
    return found


def eager_bert(bert: Bert, device: str | torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the model of Transformers, of random weights."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=bert.words,
        hidden_size=bert.width,
        num_hidden_layers=bert.layers,
        num_attention_heads=bert.heads,
        intermediate_size=bert.inner,
        max_position_embeddings=bert.positions,
        attn_implementation="sdpa",
    )
    return BertForSequenceClassification(config).eval().to(device, dtype)


def _recorded(encoder: Encoder, ids: np.ndarray, machine: Machine) -> Recording:
    rows = packed(list(ids), encoder).to(machine.device)
    return machine.record(lambda: encoder.forward(rows))


def _eager(model: PreTrainedModel, ids: np.ndarray, machine: Machine) -> Callable[[], Any]:
    given = torch.from_numpy(ids).to(machine.device)
    return lambda: model(input_ids=given).logits
