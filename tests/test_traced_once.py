"""The graphs that tests share are those of the same model with the same weights, exported in the same way."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from transformers import BertConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from export.graph.onnx import _without_masks
from tests.traced_once import really, traced_once


class Model(nn.Module):
    """Two layers of the same weights."""

    def __init__(self, times: float = 1.0, inner: type[nn.Module] = nn.ReLU, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.second = nn.Linear(3, 3), inner(), nn.Linear(3, 3)
        self.times, self.name_or_path = times, str(id(self))
        self.config = BertConfig(**config)

    def doubled(self) -> "Model":
        self.first.weight.data *= 2
        return self


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the exporter was asked for, which answers with a graph that is numbered."""
    asked: list[Any] = []

    def export(model: nn.Module, example: tuple[Any, ...], **settings: Any) -> Any:
        asked.append((model, example, settings))
        output = helper.make_tensor_value_info(f"y{len(asked)}", TensorProto.FLOAT, [1])
        return SimpleNamespace(model_proto=helper.make_model(helper.make_graph([], "made", [], [output])))

    monkeypatch.setattr(torch.onnx, "export", export)
    return asked


def test_a_graph_is_traced_anew_where_anything_differs(tmp_path: Path, traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ones, twos = (torch.full((2, 3), value) for value in (1.0, 2.0))

    def exported(model: nn.Module, example: torch.Tensor = ones, **settings: Any) -> str:
        name: str = torch.onnx.export(model, (example,), **settings).model_proto.graph.output[0].name  # type: ignore[arg-type,union-attr]
        return name

    different = [
        lambda: exported(Model()),
        lambda: exported(Model().doubled()),
        lambda: exported(Model(times=2.0)),
        lambda: exported(Model(inner=nn.Tanh)),
        lambda: exported(Model(hidden_act="relu")),
        lambda: exported(Model(), twos),
        lambda: exported(Model(), ones.double()),
        lambda: exported(Model(), input_names=["x"]),
        lambda: exported(Model().eval()),
    ]
    with traced_once(tmp_path):
        numbers = [make() for make in different]
        with _without_masks():
            numbers.append(exported(Model()))
        assert numbers == [f"y{number + 1}" for number in range(len(different) + 1)]
        assert [make() for make in different] == numbers[:-1]
    with traced_once(tmp_path):  # as another process
        assert [make() for make in different] == numbers[:-1]
        assert len(traced) == len(numbers)
        really(monkeypatch)
        assert exported(Model()) == f"y{len(numbers) + 1}"


def test_what_the_tests_share_is_left_as_it_was(tmp_path: Path, traced: list[Any]) -> None:
    with traced_once(tmp_path):
        first: Any = torch.onnx.export(Model(), (torch.ones(1),))
        first.model_proto.graph.output[0].name = "changed"
        again: Any = torch.onnx.export(Model(), (torch.ones(1),))
    assert again.model_proto.graph.output[0].name == "y1"
    assert "eager" in ALL_MASK_ATTENTION_FUNCTIONS
