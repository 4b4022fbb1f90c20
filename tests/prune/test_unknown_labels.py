"""Train rows without labels: trainings learn from the teacher alone, and whatever reads labels is refused before the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distill.distill import Distill
from foundation.core.errors import InputError
from foundation.labels.classes import UnknownClassIds
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from foundation.stage.stage import Stage
from foundation.training.finetune import Finetune
from foundation.training.supervised import supervised
from prune.prune import Prune
from prune.sparsify.sparsify import Sparsify
from quantize.quantize import Quantize
from tests.problems import raises_problem

SHORT = {"epochs": 1, "batch_size": 8, "learning_rate": 1e-2}
Contexts = Callable[..., Context]


def unlabelled(context: Context, places: Any = None) -> Context:
    """Returns the context with unknown labels; `places` are the numbers that nothing may read."""
    array = context.data.train.labels.array if places is None else places
    train = dataclasses.replace(context.data.train, labels=UnknownClassIds(array))
    return dataclasses.replace(context, data=dataclasses.replace(context.data, train=train))


STAGES = {
    "recover": lambda: Prune(method="activation", sparsity=0.4, rows=16, recover=SHORT),
    "recover by a loss": lambda: Prune(method="magnitude", sparsity=0.4, recover={**SHORT, "loss": "distilbert"}),
    "joint masks": lambda: Prune(method="joint", sparsity=0.4, granularity=["heads", "ffn"], recover=SHORT),
    "lasso": lambda: Sparsify(method="lasso", pattern={"block": [4, 4]}, sparsity=0.5, rows=16, learning=SHORT, recover=None),
    "distill": lambda: Distill(student={"layers": 2}, loss="soft_target", **SHORT),
    "mixkd": lambda: Distill(student={"layers": 2}, loss="mixkd", **SHORT),
    "qat": lambda: Quantize(mode="qat", calibration={"rows": 16}, qat=SHORT),
}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", STAGES)
def test_no_training_reads_the_numbers_of_unknown_labels(make_context: Contexts, tmp_path: Path, name: str) -> None:
    written = []
    for number, flip in enumerate((False, True)):
        context = make_context()
        context = dataclasses.replace(context, scratch=tmp_path / f"scratch-{number}")
        labels = context.data.train.labels.array
        context = unlabelled(context, 1 - labels if flip else labels)
        stage, out, config = STAGES[name](), tmp_path / f"{number}", Checkpoint(context.baseline.path).config
        out.mkdir()
        stage.check(config, config, context)
        stage.run(context.baseline, context, out)
        written.append(load_file(out / "model.safetensors"))
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(written[0][key], written[1][key]) for key in written[0])


REFUSED: dict[str, tuple[Callable[[], Stage], str]] = {
    "finetune": (lambda: Finetune(**SHORT), "stages.finetune"),
    "taylor": (lambda: Prune(method="taylor", sparsity=0.4, recover=None), "prune.method"),
    "fisher": (lambda: Prune(method="fisher", sparsity=0.4, recover=None), "prune.method"),
    "layers by their loss": (
        lambda: Prune(method="activation", sparsity=0.4, granularity=["layers"], layer_score="loss", recover=None),
        "prune.layer_score",
    ),
    "recover without a teacher": (lambda: Prune(method="magnitude", sparsity=0.4, recover={**SHORT, "distill": False}), "prune.recover"),
    "a weight of labels": (lambda: Prune(method="magnitude", sparsity=0.4, recover={**SHORT, "soft_weight": 0.5}), "recover.soft_weight"),
    "hard weight": (
        lambda: Prune(method="magnitude", sparsity=0.4, recover={**SHORT, "loss": "soft_target", "hard_weight": 0.5}),
        "recover.hard_weight",
    ),
    "labels alone": (lambda: Distill(student={"layers": 2}, loss="hard_target", **SHORT), "stages.distill"),
    "distill": (lambda: Distill(student={"layers": 2}, loss="soft_target", hard_weight=1.0, **SHORT), "distill.hard_weight"),
    "qat": (lambda: Quantize(mode="qat", calibration={"rows": 16}, qat={**SHORT, "distill": False}), "quantize.qat"),
    "auto": (lambda: Quantize(mode="auto", calibration={"rows": 16}, qat={**SHORT, "soft_weight": 0.2}), "qat.soft_weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_labels_is_refused_before_the_run(make_context: Contexts, name: str) -> None:
    made, key = REFUSED[name]
    context = make_context()
    config = Checkpoint(context.baseline.path).config
    made().check(config, config, context)
    with raises_problem(key, "data.train_labels: false"):
        made().check(config, config, unlabelled(context))


def test_an_objective_of_unknown_labels_never_gives_a_loss(make_context: Contexts) -> None:
    objective = supervised("text-classification", labels=unlabelled(make_context()).data.train.labels)
    with pytest.raises(InputError, match="train_labels"):
        objective(torch.nn.Linear(1, 1), None)  # type: ignore[arg-type]
