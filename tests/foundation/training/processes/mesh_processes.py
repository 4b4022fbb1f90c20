"""One step of a small BERT on a mesh of processes; run by `test_mesh.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foundation.core.target import Parallel
from foundation.machine.parallel import joined
from foundation.machine.sharding import is_sharded
from foundation.models.architecture.split import split_of
from foundation.training.processes.division import divided
from foundation.training.processes.engine import Engine

ROWS, LENGTH, HIDDEN, NEURONS = 6, 7, 32, 64


def model() -> Any:
    """The same model in every process."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=HIDDEN,
        intermediate_size=NEURONS,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config).train()


def drawn() -> tuple[dict[str, Tensor], Tensor]:
    """Rows of different lengths, and their labels."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.tensor([7, 3, 5, 7, 2, 6])
    mask = (torch.arange(LENGTH)[None] < lengths[:, None]).long()
    ids = torch.randint(1, 50, (ROWS, LENGTH), generator=draw) * mask
    return {"input_ids": ids, "attention_mask": mask}, torch.randint(0, 3, (ROWS,), generator=draw)


def objective(whole: nn.Module, batch: Any) -> dict[str, Tensor]:
    """The loss of every row, and its logits."""
    features, labels = batch
    logits = whole(**features).logits
    found.append(logits.detach())
    return {"loss": nn.functional.cross_entropy(logits, labels, reduction="none")}


found: list[Tensor] = []
"""Logits of the last pass."""


def alone() -> tuple[Tensor, dict[str, Tensor]]:
    """Returns logits and gradients of one process, written out."""
    plain, (features, labels) = model(), drawn()
    logits = plain(**features).logits
    nn.functional.cross_entropy(logits, labels).backward()
    return logits.detach(), {name: weight.grad for name, weight in plain.named_parameters()}


def compare(rows: int, columns: int) -> None:
    """Compares a step on a mesh with a step in one process, in every process; raises an error where they differ."""
    expected, gradients = alone()
    with joined() as first:
        parallel = Parallel(mesh=(rows, columns))
        team, shared = parallel.of(first), model()
        assert (team.data_size, team.tensor, team.sequence, team.strategy) == (rows, columns, True, "fsdp2")
        split = split_of(shared, columns, "finetune")
        division = divided(shared, team, parallel, "finetune")
        for name in (*split.columns, *split.rows):
            weight = shared.get_submodule(name).weight
            assert is_sharded(weight), name
            assert weight.to_local().numel() * rows * columns == weight.numel(), name  # neither axis is whole
        features, labels = drawn()
        own = torch.from_numpy(team.share(np.arange(ROWS)))
        widths: list[int] = []
        for block in shared.bert.encoder.layer[1:]:
            block.register_forward_pre_hook(lambda _, args: widths.append(args[0].numel()))
        engine = Engine(objective, shared, nn.ModuleList([shared]), team, parallel)
        with engine.micro_batch(last=True):
            terms = engine(({name: value[own] for name, value in features.items()}, labels[own]))
            (terms["loss"].sum() / ROWS).backward()
        padded = -(-LENGTH // columns) * columns
        assert widths == [len(own) * padded // columns * HIDDEN]  # of what blocks hand on each process has its own rows and tokens
        torch.testing.assert_close(found[-1], expected[own], atol=1e-5, rtol=1e-4)
        for name, weight in shared.named_parameters():
            torch.testing.assert_close(
                division.whole(name, weight.grad), gradients[name], atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )


def count_sums() -> None:
    """Counts the sums of a step with `tensor: 2`, in every process; raises an error where one layer sums for itself."""
    from torch.distributed.tensor.debug import CommDebugMode

    parallel = Parallel(tensor=2)
    with joined() as first:
        features, labels = drawn()
        shared: Any = divided(model(), parallel.of(first), parallel, "model").model
        depth = shared.config.num_hidden_layers
        with CommDebugMode() as counted:
            loss = nn.functional.cross_entropy(shared(**features).logits, labels)
            forward = counted.get_total_counts()
            loss.backward()
        # each attention and each FFN has one sum forward, and one backward
        assert (forward, counted.get_total_counts()) == (2 * depth, 4 * depth), counted.get_comm_counts()
