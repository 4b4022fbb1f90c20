"""What looks at a model leaves every module in its mode, training or evaluation: a model that trains may have some in either."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from distill.on_policy import OnPolicy, Sampling
from foundation.core.progress import ConsoleProgress
from foundation.measure.predictions import predict
from foundation.models.checkpoint import load
from foundation.models.forward import modes_kept
from foundation.training.precision import dtype_for
from foundation.training.rows import Rows
from foundation.training.train import Batch
from quantize.answers import written_rows
from quantize.choices import Answers
from tests.foundation import tiny_gpt

pytestmark = pytest.mark.whole


def batch() -> Batch:
    split = tiny_gpt.data().train.take(range(4))
    rows = Rows.prepare(split.rows, tiny_gpt.prepared())
    return Batch(rows.batch(np.arange(4)), torch.from_numpy(split.labels.array), np.arange(4), 0, 100)


def predicted(model: nn.Module) -> None:
    predict(model, tiny_gpt.prepared(), tiny_gpt.data().train.rows[:4], 2)


def sampled(model: nn.Module) -> None:
    assert Sampling(OnPolicy(share=1.0), 0)(model, batch()) is not None


def tried_in_bfloat16(model: nn.Module) -> None:
    assert dtype_for(model, batch().features, torch.bfloat16, "here", ConsoleProgress("quiet")) == torch.bfloat16


def answered(model: nn.Module) -> None:
    assert written_rows(model, [np.arange(4, dtype=np.int32)], Answers(tokens=4), 2, 8, 0)


@pytest.mark.parametrize("look", [predicted, sampled, tried_in_bfloat16, answered])
def test_every_module_stays_in_its_mode(look: Callable[[nn.Module], None]) -> None:
    model = load(tiny_gpt.checkpoint()).train()
    some = list(model.modules())[1::2]
    for module in some:
        module.training = False
    look(model)
    assert [module for module in model.modules() if not module.training] == some


def test_modes_come_back_after_an_error() -> None:
    def fails(model: nn.Module) -> None:
        with modes_kept(model):
            model.eval()
            raise ZeroDivisionError

    model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    with pytest.raises(ZeroDivisionError):
        fails(model)
    assert [module.training for module in model] == [True, False]
