"""Bias correction against the means of the float network, layer after layer, and what it leaves as it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from foundation.artifacts.artifact import Artifact
from foundation.schemes.int8 import LayerScales, int8_linear, levels, weight_scale
from foundation.stage.context import Context
from quantize import steps
from quantize.bias_correction import correct_biases
from quantize.quantize import Quantize

pytestmark = pytest.mark.whole


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


def outputs(net: nn.Module, forms: Mapping[str, nn.Module], x: Tensor) -> dict[str, list[Tensor]]:
    """Everything that each layer gives, in the order of its runs, written out for the net with some layers replaced."""
    layer = {**layers_of(net), **forms}
    a, b = layer["a"](x), layer["b"](x)
    c = layer["c"](torch.relu(a + b))
    d = layer["d"](c)
    return {"a": [a], "b": [b], "c": [c], "d": [d, layer["d"](d)]}


def mean(found: list[Tensor]) -> Tensor:
    return torch.cat([y.reshape(-1, y.shape[-1]) for y in found]).double().mean(0)


def naive(rows: list[dict[str, Tensor]], positions: int) -> dict[str, Tensor]:
    """Corrects one group after the other, all rows at once: b + E[y in the float network] - E[y with all layers so far in int8]."""
    net, scales = Net(), coarse(Net())
    x = torch.cat([features["x"][:, :positions] for features in rows])
    in_float = outputs(Net(), {}, x)
    done: list[str] = []
    for names in (["a", "b"], ["c"], ["d"]):
        done += names
        found = outputs(net, {name: int8_linear(name, layers_of(net)[name], scales[name]) for name in done}, x)
        for name in names:
            layer = layers_of(net)[name]
            if layer.bias is not None:
                layer.bias.data += (mean(in_float[name]) - mean(found[name])).float()
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


class Stack(nn.Module):
    """Linear layers with ReLU between them; each may have a bias."""

    def __init__(self, seed: int, biases: list[bool]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for number, bias in enumerate(biases):
                self.add_module(f"l{number}", nn.Linear(5, 5, bias))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(torch.relu(x))
        return x


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.booleans(), min_size=1, max_size=4))
def test_the_mean_output_of_every_layer_is_that_of_the_float_network(seed: int, biases: list[bool]) -> None:
    """With all layers in int8; a layer without a bias keeps its error, and the next one makes up for it."""
    net, before = Stack(seed, biases), Stack(seed, biases)
    rows = [{"x": torch.randn(n, 3, 5, generator=torch.Generator().manual_seed(n))} for n in (4, 7)]
    scales = coarse(net)
    correct_biases(net, layers_of(net), scales, {name: name for name in layers_of(net)}, lambda: rows, send)
    x = torch.cat([features["x"] for features in rows]).reshape(-1, 5)
    with torch.inference_mode():
        ours = theirs = x
        for (name, layer), original in zip(layers_of(net).items(), layers_of(before).values(), strict=True):
            ours, theirs = int8_linear(name, layer, scales[name])(torch.relu(ours)), original(torch.relu(theirs))
            if layer.bias is not None:
                assert (ours.double().mean(0) - theirs.double().mean(0)).abs().max() < 1e-5, name


def test_a_layer_that_the_first_batch_does_not_reach_is_corrected_by_the_others() -> None:
    """Rows above 0 go through b as well; the first batch has none."""

    def routed(model: nn.Module, features: Mapping[str, Tensor]) -> object:
        y = model.l0(features["x"])  # type: ignore[operator]
        return model.l1(features["x"]) if bool((features["x"] > 0).any()) else y  # type: ignore[operator]

    net = Stack(0, [True, True])
    rows = [{"x": -torch.ones(2, 5)}, {"x": torch.ones(2, 5)}]
    original, scales = layers_of(Stack(0, [True, True])), coarse(net)
    moved = correct_biases(net, layers_of(net), scales, {"l0": "l0", "l1": "l0"}, lambda: rows, routed)
    assert set(moved) == {"l0", "l1"}
    with torch.inference_mode():
        for name, x in {"l0": torch.cat([features["x"] for features in rows]), "l1": rows[1]["x"]}.items():
            found = int8_linear(name, layers_of(net)[name], scales[name])(x)
            assert (mean([found]) - mean([original[name](x)])).abs().max() < 1e-5, name
    net = Stack(0, [True, True])
    assert set(correct_biases(net, layers_of(net), scales, {"l0": "l0", "l1": "l0"}, lambda: rows[:1], routed)) == {"l0"}
    assert torch.equal(layers_of(net)["l1"].bias, original["l1"].bias)


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
    assert len(passes) == 1 + 3  # the float network, then a with b, c, d


def test_a_pass_ends_with_the_layers_of_interest() -> None:
    net, ran = Net(), []
    net.d.register_forward_hook(lambda *_: ran.append(1))
    correct(net, batches())
    assert len(ran) == 2 * (3 + 1 + 1)  # every batch of the float network, the first one of the passes up to a and b, and up to c


def test_the_stage_keeps_only_what_brings_it_closer(bert: Artifact, context: Context, told: Any, tmp_path: Path, monkeypatch) -> None:
    def figures(name: str) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        keys = {"smoothquant": False, "bias_correction": True, "weight_bits": 7}
        return Quantize(id="quantize", **keys).run(bert, context, tmp_path / name)["bias_correction"]

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
