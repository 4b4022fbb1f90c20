"""Stages that train with activation checkpointing come to the losses and weights that they come to without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distill.distill import Distill
from foundation.core.target import Checkpointing, Parallel
from foundation.machine.parallel import ALONE
from foundation.models.checkpoint import load
from foundation.stage.stage import Stage
from foundation.training import teacher_logits, train
from foundation.training.finetune import Finetune
from prune.prune import Prune
from prune.sparsify.sparsify import Sparsify
from quantize.quantize import Quantize
from tests.distill.processes import context_of
from tests.seldom import seldom

pytestmark = pytest.mark.whole

SHORT = {"learning_rate": 2e-3, "batch_size": 12, "epochs": 1}
STAGES: dict[str, Stage] = {
    "finetune": Finetune(**SHORT),
    "finetune lora": Finetune(**SHORT, lora={"rank": 2}),  # type: ignore[arg-type]
    "inside": Distill(
        **SHORT,  # type: ignore[arg-type]
        micro_batch_size=6,
        student={"layers": 2},  # type: ignore[arg-type]
        losses=[{"name": "hidden"}, {"name": "minilmv2"}, {"name": "soft_target"}],  # type: ignore[arg-type]
    ),
    "qat": Quantize(mode="qat", qat={**SHORT, "learning_rate": 1e-4, "dropout": True, "keep": "last"}),  # type: ignore[arg-type]
    "recovery": Prune(sparsity=0.4, recover={**SHORT, "hidden_weight": 0.5}),  # type: ignore[arg-type]
    "joint": Prune(method="joint", sparsity=0.4, recover=SHORT, learn={"epochs": 1}),  # type: ignore[arg-type]
    "sparse": Sparsify(method="magnitude", sparsity=0.5, recover=SHORT),  # type: ignore[arg-type]
    "movement": Sparsify(method="movement", sparsity=0.5, learning=SHORT, recover=None),  # type: ignore[arg-type]
    "lasso": Sparsify(method="lasso", pattern={"block": [4, 4]}, sparsity=0.5, learning=SHORT, recover=None),  # type: ignore[arg-type]
}


def trained(
    stage: Stage, kind: Checkpointing, source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, half: bool
) -> tuple[list[Any], nn.Module, int]:
    """The losses, the model that a stage writes, and how often blocks were computed again."""
    losses: list[Any] = []
    runs = [0]
    original, backward = train._Loop._look, torch.Tensor.backward
    dtype = torch.bfloat16 if half else torch.float32
    for place in (train, teacher_logits):
        monkeypatch.setattr(place, "autocast_dtype", lambda device: dtype)

    def look(self: Any, *arguments: Any) -> None:
        losses.append(dict(self.sums))
        original(self, *arguments)

    def counted(self: Any, *arguments: Any, **keys: Any) -> None:
        def called(module: Any, inputs: Any) -> None:
            runs[0] += type(module).__name__ == "BertSelfAttention"

        with nn.modules.module.register_module_forward_pre_hook(called):
            backward(self, *arguments, **keys)

    with monkeypatch.context() as patched:
        patched.setattr(train._Loop, "_look", look)
        patched.setattr(torch.Tensor, "backward", counted)
        (folder / "dropping").mkdir(parents=True)
        context = context_of(folder, "dropping", folder / "scratch", ALONE, Parallel(checkpointing=kind))
        baseline = replace(context.baseline, path=source)
        context = replace(context, checkpoints={"baseline": baseline}, teachers=(baseline,))
        out = folder / "out"
        out.mkdir()
        stage.run(baseline, context, out)
    return losses, load(out), runs[0]


@pytest.mark.parametrize("half", [pytest.param(False, marks=pytest.mark.slow), True])  # autocast has casts that are computed again, too
@pytest.mark.parametrize("name", seldom(STAGES, {"finetune lora", "recovery", "joint", "sparse", "movement", "lasso"}))
def test_stages_come_to_the_same(
    name: str, half: bool, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("bert")
    expected, model, none = trained(STAGES[name], "none", source, tmp_path / "none", monkeypatch, half)
    assert expected
    assert none == 0
    for kind in ("full", "selective"):
        losses, other, again = trained(STAGES[name], kind, source, tmp_path / kind, monkeypatch, half)
        assert again > 0
        assert len(losses) == len(expected)
        for mine, theirs in zip(losses, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(other.state_dict()[key], value, rtol=0, atol=1e-6, msg=key)
