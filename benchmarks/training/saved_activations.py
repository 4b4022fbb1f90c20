"""What saved activations in 8 bits (`parallel: {checkpointing: int8}`) take and cost: bytes, and accuracy on SST-2.

    python benchmarks/training/saved_activations.py --model MINILM --data SST2 [--rows 4000] [--epochs 1] [--seeds 0] [--out FOLDER]
        [--bytes-only]

MINILM is a MiniLM-L6, whose head is new; SST2 holds GLUE's files and sentence_level_test.tsv.

bytes      of all tensors that are alive between the forward and the backward pass of a batch of 32 rows, besides weights, their casts and
           inputs: what is kept for backward. As it is, in 8 bits, and with selective and full recomputation; with dropout in attention,
           which torch then computes step by step on a CPU and keeps several matrices of, and without, where it is fused. Beside it what
           is packed alone (inputs of linear layers, norms and activation functions), as a share of its bytes in bfloat16. On fake
           tensors, which have shapes and storages and are not computed: the bytes are the same.
accuracy   three fine-tunings with the same seed, rows and order: as it is, in 8 bits, and with full recomputation, whose gradients are
           those of the first; the paired 95 % interval of the differences, n = 2,693.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForSequenceClassification
from variants import SST2, SST2_ROWS, table, trained

from foundation.core.target import Checkpointing
from foundation.training import saved_int8
from foundation.training.recompute import caches_casts, recomputed

LENGTHS, BATCH = (32, 128), 32
ACCURACY_OF: tuple[Checkpointing, ...] = ("none", "int8", "full")


class Alive(TorchDispatchMode):
    """Storages that operations have made, as long as they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int, tuple[int, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), tuple(tensor.shape)
        return result

    def bytes(self, known: Iterable[torch.Tensor]) -> int:
        """Returns the bytes that are alive, besides some tensors and copies of their shapes (casts of weights)."""
        known = list(known)
        storages = {tensor.untyped_storage()._cdata for tensor in known}
        shapes = {shape for tensor in known for shape in (tuple(tensor.shape), tuple(tensor.shape)[::-1])}
        alive = ((key, size, shape) for key, (weak, size, shape) in self._made.items() if not weak.expired())
        return sum(size for key, size, shape in alive if key not in storages and shape not in shapes)


def kept_bytes(folder: Path, kind: Checkpointing, half: bool, fused: bool, length: int) -> tuple[int, float]:
    """Returns the bytes that a forward pass keeps for backward, and for what is packed the share of its bytes in bfloat16."""
    config = AutoConfig.from_pretrained(folder)
    if fused:
        config.attention_probs_dropout_prob = 0.0
    with FakeTensorMode(), counted() as packed:
        model = AutoModelForSequenceClassification.from_config(config).train()
        ids, mask = (torch.ones(BATCH, length, dtype=torch.int64) for _ in range(2))
        precision = torch.autocast("cpu", torch.bfloat16, cache_enabled=caches_casts(kind)) if half else nullcontext()
        with recomputed(model, kind, "bytes"), precision, Alive() as alive:
            loss = model(input_ids=ids, attention_mask=mask, labels=ids[:, 0] * 0).loss
            found = alive.bytes([*model.parameters(), *model.buffers(), ids, mask])
    assert loss.requires_grad  # it holds the graph
    now, before = (sum(sizes) for sizes in zip(*packed, strict=True)) if packed else (0, 1)
    return found, now / before


@contextmanager
def counted() -> Iterator[list[tuple[int, int]]]:
    """Yields a list that gets the bytes of every tensor that is packed within the block, and its bytes in bfloat16."""
    own, found = saved_int8.packed, list[tuple[int, int]]()

    def counting(tensor: torch.Tensor) -> saved_int8.Packed:
        made = own(tensor)
        found.append((made.codes.nbytes + made.scale.nbytes, 2 * tensor.numel()))
        return made

    saved_int8.packed = counting  # type: ignore[assignment]
    try:
        yield found
    finally:
        saved_int8.packed = own


def bytes_table(folder: Path) -> str:
    """Returns the bytes as a Markdown table: MiB, the share of what bfloat16 keeps as it is, and the share of what is packed."""
    heads = ["attention", "precision", "checkpointing", *(f"{length} tokens" for length in LENGTHS), "what is packed"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for fused in (False, True):
        plain = {length: kept_bytes(folder, "none", True, fused, length)[0] for length in LENGTHS}
        for half, kind in ((False, "none"), *((True, kind) for kind in get_args(Checkpointing))):
            found = {length: kept_bytes(folder, kind, half, fused, length) for length in LENGTHS}
            cells = ["fused" if fused else "with dropout", "bfloat16" if half else "float32", kind]
            cells += [f"{kept / 2**20:.1f} ({kept / plain[length]:.3f}x)" for length, (kept, _) in found.items()]
            lines.append(f"| {' | '.join(cells)} | {f'{found[LENGTHS[-1]][1]:.3f}x' if kind == 'int8' else ''} |")
    return "\n".join(lines)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a MiniLM-L6; its head is new")
    parser.add_argument("--data", type=Path, required=True, help="folder of SST-2")
    parser.add_argument("--rows", type=int, default=4000, help="train rows")
    parser.add_argument("--epochs", type=float, default=1, help="passes")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of head, order and dropout")
    parser.add_argument("--bytes-only", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/saved-activations"), help="where to work")
    arguments = parser.parse_args()
    print(
        f"MiB kept for the backward pass of {BATCH} rows, and the share of plain bfloat16\n\n{bytes_table(arguments.model)}\n", flush=True
    )
    for seed in [] if arguments.bytes_only else arguments.seeds:
        keys = {"model": arguments.model.resolve(), "data": arguments.data.resolve(), "epochs": arguments.epochs, "seed": seed}
        text = SST2.format(name="saved", fraction=min(1.0, arguments.rows / SST2_ROWS), **keys)
        found = [trained(kind, text, [f"parallel.checkpointing={kind}"], arguments.out / str(seed)) for kind in ACCURACY_OF]
        print(f"seed {seed}, {arguments.rows:,} rows\n\n{table(found, 'none', 'full')}\n", flush=True)


if __name__ == "__main__":
    main()
