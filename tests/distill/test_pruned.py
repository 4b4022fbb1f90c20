"""Models that pruning left with other heads in every layer, as students and as teachers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distill.distill import Distill
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.models.architecture.shapes import remade, with_sizes
from foundation.models.checkpoint import load, save
from foundation.stage.context import Context
from foundation.training.losses.distillation.loss import Shape
from tests.foundation.sizes import sizes_of

pytestmark = pytest.mark.whole

OWN = {"heads": (1, 2, 3, 4), "key_value_heads": (1, 2, 3, 4), "ffn": (8, 12, 16, 20)}


@pytest.fixture
def pruned(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    model: Any = load(checkpoint("bert"))
    own = with_sizes(model.config, replace(sizes_of(model.config, "prune"), **OWN), "prune")  # type: ignore[arg-type]
    folder = tmp_path / "pruned"
    folder.mkdir()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save(remade(model, own), checkpoint("bert"), folder, "pruned")
    return folder


def distilled(stage: Distill, incoming: Path, context: Context, out: Path) -> Any:
    out.mkdir()
    config = load(incoming).config
    assert context.teacher is not None
    stage.check(config, load(context.teacher.path).config, context)
    stage.run(Artifact(incoming, {"id": "prune", "digest": "1" * 64}), context, out)
    return load(out)


@pytest.mark.first(1)
@pytest.mark.parametrize("loss", ["soft_target", "distilbert", "pkd", "minilmv2", "mixkd"])
def test_it_learns_from_the_baseline(loss: Any, pruned: Path, make_context: Callable[..., Context], tmp_path: Path) -> None:
    student = distilled(Distill(epochs=0.5, loss=loss), pruned, make_context(), tmp_path / "out")
    assert sizes_of(student.config, "out").heads == OWN["heads"]


@pytest.mark.parametrize("loss", ["soft_target", "minilmv2"])
def test_it_teaches(loss: Any, pruned: Path, checkpoint: Callable[..., Path], make_context: Callable[..., Context], tmp_path: Path) -> None:
    student = distilled(Distill(epochs=0.5, loss=loss), checkpoint("bert"), make_context(pruned), tmp_path / "out")
    assert sizes_of(student.config, "out").heads == (4, 4, 4, 4)


def test_some_of_its_layers_are_a_student(pruned: Path, make_context: Callable[..., Context], tmp_path: Path) -> None:
    stage = Distill(epochs=0.5, student={"layers": 2, "init": (2, 4)})
    student = distilled(stage, pruned, make_context(), tmp_path / "out")
    assert sizes_of(student.config, "out").ffn == (12, 20)
    assert sizes_of(stage.config_after(load(pruned).config), "out").same(sizes_of(student.config, "out"))


def test_losses_that_compare_head_by_head_say_no(pruned: Path, make_context: Callable[..., Context], tmp_path: Path) -> None:
    for loss in ("minilm", "tinybert"):
        with pytest.raises(InputError, match="the student has different numbers of heads, the teacher 4"):
            distilled(Distill(epochs=0.5, loss=loss), pruned, make_context(), tmp_path / loss)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has a shape of its own, as it was pruned"):
        Distill(student={"ffn": 4}).config_after(load(pruned).config)
    other = Distill(student={"config": {"num_hidden_layers": 1}}).config_after(load(pruned).config)
    assert not hasattr(other, "compress_architecture")


def test_what_all_layers_have_in_common(pruned: Path) -> None:
    assert Shape.of(load(pruned).config) == Shape("bert", 4, 16, 0, 2, 4)
