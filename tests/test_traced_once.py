"""The graphs that tests share are those of the same model with the same weights, exported in the same way."""

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from export.graph import small_terms
from export.graph.onnx import _without_masks, export_float
from foundation.models.folder import Checkpoint
from tests.export import tiny_checkpoints as tiny
from tests.quick_traces import plain
from tests.seldom import seldom
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
    """What the exporter was asked for, which answers with a graph that is numbered, and holds something that is made of weights."""
    asked: list[Any] = []

    def export(model: Any, example: tuple[Any, ...], **settings: Any) -> Any:
        asked.append((model, example, settings))
        made = numpy_helper.from_array((model.first.weight @ model.second.weight).detach().numpy(), "made")
        output = helper.make_tensor_value_info(f"y{len(asked)}", TensorProto.FLOAT, [1])
        return helper.make_model(helper.make_graph([], "made", [], [output], [made]))

    monkeypatch.setattr(small_terms, "traced", export)
    return asked


def test_a_graph_is_traced_anew_where_anything_differs(tmp_path: Path, traced: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ones, twos = (torch.full((2, 3), value) for value in (1.0, 2.0))

    def exported(model: nn.Module, example: torch.Tensor = ones, **settings: Any) -> str:
        name: str = small_terms.traced(model, (example,), **settings).graph.output[0].name
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


def test_dropout_is_read_in_training_alone(tmp_path: Path, traced: list[Any]) -> None:
    with traced_once(tmp_path):
        for mode, share in product((False, True), (0.1, 0.3)):
            model = Model(hidden_dropout_prob=share)
            model.inner = nn.Dropout(share)
            small_terms.traced(model.train(mode), (torch.ones(1),))
    assert [(model.training, model.inner.p) for model, *_ in traced] == [(False, 0.1), (True, 0.1), (True, 0.3)]


def test_weights_that_are_not_apart_have_to_be_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Module] = []

    def export(model: nn.Module, example: tuple[Any, ...], **settings: Any) -> Any:
        asked.append(model)
        held = [numpy_helper.from_array(value.detach().numpy(), name) for name, value in model.named_parameters()]
        return helper.make_model(helper.make_graph([], "held", [], [], held))

    def drawn_with(seed: int, bias: float) -> nn.Module:
        model = Model()
        torch.manual_seed(seed)
        for value in model.parameters():
            nn.init.normal_(value) if value.ndim == 2 else nn.init.constant_(value, bias)
        return model

    monkeypatch.setattr(small_terms, "traced", export)
    models = [drawn_with(1, 0.0), drawn_with(2, 0.0), drawn_with(2, 1.0)]
    with traced_once(tmp_path):
        graphs: list[Any] = [small_terms.traced(model, (torch.ones(1),)) for model in models]
    assert asked == [models[0], models[2]]
    for model, made in zip(models, graphs, strict=True):
        held = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
        assert all((held[name] == value.detach().numpy()).all() for name, value in model.named_parameters())


def test_what_the_tests_share_is_left_as_it_was(tmp_path: Path, traced: list[Any]) -> None:
    with traced_once(tmp_path):
        first: Any = small_terms.traced(Model(), (torch.ones(1),))
        first.graph.output[0].name = "changed"
        again: Any = small_terms.traced(Model(), (torch.ones(1),))
    assert again.graph.output[0].name == "y1"
    assert "eager" in ALL_MASK_ATTENTION_FUNCTIONS


def drawn(folder: Path, source: Path, seed: int) -> Path:
    """Copies a checkpoint, with noise on all weights."""
    shutil.copytree(source, folder)
    torch.manual_seed(seed)
    weights = {name: weight + 0.1 * torch.randn(weight.shape) for name, weight in load_file(source / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.first(1)
@pytest.mark.whole
@pytest.mark.parametrize("family", seldom(tiny.CONFIGS, tiny.CONFIGS.keys() - {"distilbert", "vit"}))
def test_other_weights_come_to_the_bytes_of_another_trace(
    family: str, folder_of_traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the traces is that of any test, the second one a trace of a user, without what traces of tests share."""
    tiny.write(tmp_path / "source", family)
    prepared, traces = tiny.preprocessor(family), list[Any]()
    really(monkeypatch)
    export: Any = torch.onnx.export

    def counted(*given: Any, **settings: Any) -> Any:
        traces.append(given)
        return export(*given, **settings)

    monkeypatch.setattr(torch.onnx, "export", counted)
    one, other = (drawn(tmp_path / f"{seed}", tmp_path / "source", seed) for seed in (1, 2))
    with traced_once(folder_of_traces):
        export_float(Checkpoint(one), prepared, tmp_path / "one.onnx")
        before = len(traces)
        put_in = export_float(Checkpoint(other), prepared, tmp_path / "put in.onnx").read_bytes()
    assert len(traces) == before <= 1
    with plain():
        traced = export_float(Checkpoint(other), prepared, tmp_path / "traced.onnx").read_bytes()
    assert traced == put_in != (tmp_path / "one.onnx").read_bytes()
