"""Terms that guard divisions and logarithms are still in the exported graph; terms that change nothing are not."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from export.graph import small_terms

pytestmark = pytest.mark.whole


class Guarded(nn.Module):
    """What models guard, and what an optimizer may take away: `x + 0` and `x * 1`."""

    def forward(self, p: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        length = x.norm(dim=-1, keepdim=True)
        entropy = -(p * torch.log(p + 1e-9)).sum(dim=-1)
        return entropy, x / (length + 1e-8), x / (1e-12 + length), p - 1e-10, x * 1.000009, x / 0.999995, (x + 0.0) * 1.0


SPECIAL = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, 0.0], [3.0, 4.0]])
SETTINGS = {"input_names": ["p", "x"], "dynamic_shapes": ({0: torch.export.Dim.DYNAMIC}, {0: torch.export.Dim.DYNAMIC})}


def answers(model: onnx.ModelProto) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return list(session.run(None, dict(zip("px", (one.numpy() for one in SPECIAL), strict=True))))


def test_the_exported_graph_gives_the_numbers_of_torch() -> None:
    model = small_terms.traced(Guarded().eval(), SPECIAL, **SETTINGS)
    for found, right in zip(answers(model), Guarded()(*SPECIAL), strict=True):
        np.testing.assert_allclose(found, right.numpy(), rtol=1e-6, atol=1e-7)
    kinds = Counter(node.op_type for node in model.graph.node)
    assert (kinds["Add"], kinds["Sub"], kinds["Mul"], kinds["Div"]) == (3, 1, 2, 3), "no neutral term, and every other one"


def test_the_optimizer_of_the_exporter_alone_loses_them() -> None:
    program = torch.onnx.export(Guarded().eval(), SPECIAL, dynamo=True, verbose=False, **SETTINGS)
    assert program is not None
    entropy, unit, *_ = answers(program.model_proto)
    assert np.isnan(entropy[0]), "the exporter keeps small terms now, and `export.graph.small_terms` has no use any more"
    assert np.isnan(unit[0]).all()


@pytest.mark.parametrize("text", ["x + 1e-9", "1e-9 + x", "x - 1e-9", "x * 1.000001", "x / 1.000001"])
def test_every_operator_is_protected_once(text: str) -> None:
    class One(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            term: Tensor = eval(text, {"x": x})
            return term

    program = torch.onnx.export(One().eval(), (torch.ones(2, 3),), dynamo=True, optimize=False, verbose=False)
    assert program is not None
    assert [small_terms.protect(program.model) for _ in range(2)] == [1, 0]
