"""Bias correction against means taken layer by layer, and what it leaves as it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from compress.artifacts.artifact import Artifact
from compress.schemes.int8 import LayerScales, int8_linear, levels, weight_scale
from compress.stage.context import Context
from quantize import steps
from quantize.bias_correction import correct_biases
from quantize.quantize import Quantize


class Net(nn.Module):
    """Two layers read the input, a third their sum, a fourth runs twice."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a, self.b, self.c, self.d = nn.Linear(6, 5), nn.Linear(6, 5, bias=False), nn.Linear(5, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.d(self.d(self.c(torch.relu(self.a(x) + self.b(x)))))
        return y


GROUP = {"a": "a", "b": "a", "c": "c", "d": "d"}


def layers_of(net: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in net.named_children() if isinstance(layer, nn.Linear)}


def coarse(net: nn.Module) -> dict[str, LayerScales]:
    """Scales that clip much, so that there is something to correct."""
    return {
        name: LayerScales(weight_scale(layer.weight.detach(), levels(8)) * 0.5, torch.tensor(0.004), 8)
        for name, layer in layers_of(net).items()
    }


def send(model: nn.Module, features: Mapping[str, Tensor]) -> object:
    return model(features["x"])


def batches(masked: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = [{"x": torch.randn(n, 3, 6, generator=generator)} for n in (4, 1, 7)]
    if masked:
        for features in found:
            features["attention_mask"] = torch.tensor([1, 1, 0]).expand(features["x"].shape[:2])
    return found


def correct(net: nn.Module, rows: list[dict[str, Tensor]], passes: list[int] | None = None) -> dict[str, float]:
    def start() -> Iterable[Mapping[str, Tensor]]:
        if passes is not None:
            passes.append(1)
        return rows

    return correct_biases(net, layers_of(net), coarse(net), GROUP, start, send)


def naive(rows: list[dict[str, Tensor]], positions: int) -> dict[str, Tensor]:
    """Corrects one layer after the other, all rows at once, in float64."""
    net, scales = Net(), coarse(Net())
    a, b, c, d = (layers_of(net)[name] for name in "abcd")
    integer: dict[str, nn.Module] = {}

    def fix(name: str, layer: nn.Linear, *inputs: Tensor) -> None:
        before = int8_linear(name, layer, scales[name])
        if layer.bias is not None:
            shifts = torch.cat([(layer(x) - before(x)).reshape(-1, layer.out_features) for x in inputs])
            layer.bias.data += shifts.double().mean(0).float()
        integer[name] = int8_linear(name, layer, scales[name])

    x = torch.cat([features["x"][:, :positions] for features in rows])
    fix("a", a, x)
    fix("b", b, x)
    hidden = torch.relu(integer["a"](x) + integer["b"](x))
    fix("c", c, hidden)
    y = integer["c"](hidden)
    fix("d", d, y, d(y))  # what the second run gets from the first is float: both are corrected together
    return {name: layer.bias.detach() for name, layer in layers_of(net).items() if layer.bias is not None}


@pytest.mark.parametrize("masked", [False, True])
def test_biases_are_those_of_the_naive_correction(masked: bool) -> None:
    net, rows = Net(), batches(masked)
    with torch.inference_mode():
        expected = naive(rows, 2 if masked else 3)
    moved = correct(net, rows)
    assert set(moved) == {"a", "c", "d"}
    for name, bias in expected.items():
        assert torch.allclose(layers_of(net)[name].bias, bias, atol=1e-5), name
        assert not torch.allclose(bias, layers_of(Net())[name].bias, atol=1e-2)


def test_the_mean_output_of_every_layer_is_that_of_float() -> None:
    net, rows = Net(), batches()
    scales, x = coarse(net), torch.cat([features["x"] for features in rows]).reshape(-1, 6)
    with torch.inference_mode():
        float_mean = net.a(x).double().mean(0)
        wrong = int8_linear("a", net.a, scales["a"])(x).double().mean(0)
    correct(net, rows)
    with torch.inference_mode():
        corrected = int8_linear("a", net.a, scales["a"])(x).double().mean(0)
    assert (corrected - float_mean).abs().max() < 1e-6 < 0.01 < (wrong - float_mean).abs().max()


def test_weights_layers_and_hooks_are_left_as_they_were() -> None:
    net = Net()
    layers, weights = layers_of(net), {name: layer.weight.clone() for name, layer in layers_of(net).items()}
    correct(net, batches())
    assert layers_of(net) == layers
    assert all(torch.equal(layer.weight, weights[name]) for name, layer in layers.items())
    assert not any(module._forward_hooks for module in net.modules())


def test_a_failure_leaves_the_float_layers_in_place() -> None:
    net, passes = Net(), 0

    def broken(model: nn.Module, features: Mapping[str, Tensor]) -> object:
        nonlocal passes
        passes += 1
        if passes > 3:
            raise RuntimeError("no power")
        return send(model, features)

    layers = layers_of(net)
    with pytest.raises(RuntimeError, match="no power"):
        correct_biases(net, layers, coarse(net), GROUP, batches, broken)
    assert layers_of(net) == layers
    assert not any(module._forward_hooks for module in net.modules())


def test_there_is_one_pass_for_the_layers_of_one_tensor() -> None:
    passes: list[int] = []
    correct(Net(), batches(), passes)
    assert len(passes) == 3


def test_a_pass_ends_with_the_layers_of_interest() -> None:
    net, ran = Net(), []
    net.d.register_forward_hook(lambda *_: ran.append(1))
    correct(net, batches())
    assert len(ran) == 2 * (1 + 1 + 3)  # the first batch of each pass goes through, of the last pass every batch


def test_the_stage_keeps_only_what_brings_it_closer(bert: Artifact, context: Context, told: Any, tmp_path: Path, monkeypatch) -> None:
    def figures(name: str) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        settings = {"smoothquant": False, "bias_correction": True, "weight_bits": 7}
        return Quantize(id="quantize", **settings).run(bert, context, tmp_path / name)["bias_correction"]

    kept = figures("kept")
    assert kept["kept"] == (kept["after"] <= kept["before"])
    assert (kept["measure"], kept["rows"], len(kept["shifts"])) == ("kl", 40, 12)

    def spoil(model: nn.Module, layers: Mapping[str, nn.Linear], *_: object) -> dict[str, float]:
        for layer in layers.values():
            layer.bias.data = layer.bias.data + 10
        return {}

    monkeypatch.setattr(steps, "correct_biases", spoil)
    undone = figures("undone")
    assert not undone["kept"]
    assert undone["after"] > undone["before"] == kept["before"]
    assert "undone" in told.warnings[-1]
    before, after = (load_file(folder / "model.safetensors") for folder in (bert.path, tmp_path / "undone"))
    assert all(torch.equal(after[name], value) for name, value in before.items() if name.endswith("bias"))
