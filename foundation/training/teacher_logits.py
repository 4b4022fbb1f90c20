"""The logits of a teacher for all training rows: computed once, for every stage and every run that shares a store.

They are stored in a file that is named by everything they depend on, so a training that was stopped, the recovery of a pruned student and
the candidates of a search read the same bits. Nothing else is lost with the file: it is made again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from foundation.artifacts.artifact import digest, writing
from foundation.artifacts.store import holding
from foundation.models.forward import device_of, forward, on_device
from foundation.stage.context import Context
from foundation.training.precision import autocast_dtype, dtype_for
from foundation.training.rows import Rows

BATCH_SIZE = 64
FILE = "logits.safetensors"
SHA256 = "sha256"


def teacher_logits(model: nn.Module, rows: Rows, identity: Mapping[str, object], context: Context, label: str) -> Tensor:
    """Returns a model's logits for all rows, float32 `[n, C]` on the CPU; reads them where they are known.

    Args:
        model: The teacher, on its device, in evaluation mode.
        rows: The training rows as inputs of the teacher.
        identity: What the logits depend on: digests of the teacher and of the rows (JSON types).
        context: Progress, folders, and the processes that share the work: each computes every `size`-th batch; the first one writes.
        label: Label of the progress bar.
    """
    from safetensors.torch import save_file

    team, device = context.team.without_pipeline, device_of(model)
    few = on_device(rows.batch(np.arange(min(2, len(rows.lengths)))), device)
    autocast = team.broadcast_object(autocast_dtype(device))  # each process measures its own processor
    if not team.runs_together:  # a single process cannot run a divided model
        autocast = dtype_for(model, few, autocast, label, context.progress)
    identity = {**identity, "autocast": str(autocast), "threads": torch.get_num_threads(), "torch": torch.__version__}
    folder = (context.shared or context.scratch) / f"teacher-{digest(identity)[:16]}"
    with _held(folder, context):
        known = _read(folder / FILE, context) if team.is_first else None
        if team.broadcast(known is not None):
            context.progress.log(f"  {label}: reading cached teacher logits from {folder}")
            return dict(team.spread({} if known is None else {"logits": known}))["logits"]
        logits = _computed(model, rows, autocast, context, label)
        if team.is_first:
            with writing(folder) as temporary:
                save_file({"logits": logits}, temporary / FILE, metadata={SHA256: _sha256(logits)})
    return logits


def _read(file: Path, context: Context) -> Tensor | None:
    """Returns the logits in a file; None where there is none, or with a warning where its bytes are not those that were written."""
    from safetensors import SafetensorError, safe_open

    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as given:
            logits: Tensor = given.get_tensor("logits")
            if (given.metadata() or {}).get(SHA256) == _sha256(logits):
                return logits
    except SafetensorError:
        pass
    context.progress.warn(f"{file}: damaged, so the teacher runs again")
    return None


def _sha256(logits: Tensor) -> str:
    return hashlib.sha256(logits.contiguous().numpy().tobytes()).hexdigest()


def _held(folder: Path, context: Context) -> AbstractContextManager[None]:
    """Returns the lock on the file, where other runs share the store; only the first process takes it."""
    if context.shared is None or not context.team.is_first:
        return nullcontext()
    return holding(context.shared.parent, folder.name, context.progress.log)


def _computed(model: nn.Module, rows: Rows, autocast: torch.dtype | None, context: Context, label: str) -> Tensor:
    """Returns the logits in every process. Rows of similar length run together. Equal rows, such as rows of a repeated file, run once."""
    team, device = context.team.without_pipeline, device_of(model)
    distinct = np.unique(rows.first_equal)
    order = distinct[np.argsort(-rows.lengths[distinct], kind="stable")]
    all_logits: Tensor | None = None
    with torch.no_grad(), context.progress.bar(f"{label}: teacher", len(order)) as advance:
        for start in range(BATCH_SIZE * team.data_rank, len(order) + BATCH_SIZE * team.data_rank, BATCH_SIZE * team.data_size):
            mine = order[start : start + BATCH_SIZE]
            indices = mine if len(mine) else order[:1]  # a sharded model runs only if all processes run it together
            with torch.autocast(device.type, torch.bfloat16) if autocast == torch.bfloat16 else nullcontext():
                logits = forward(model, on_device(rows.batch(indices), device)).cpu()
            all_logits = torch.zeros(len(rows.lengths), logits.shape[1]) if all_logits is None else all_logits
            if len(mine):
                all_logits[torch.from_numpy(indices)] = logits
            advance(min(BATCH_SIZE * team.data_size, len(order) - start + BATCH_SIZE * team.data_rank))
        assert all_logits is not None, "no rows"
        return team.add(all_logits)[torch.from_numpy(rows.first_equal)]
