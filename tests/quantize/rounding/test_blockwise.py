"""AutoRound in a model: the inputs and the target of each block, and blocks that are called in other ways.

python -m pytest tests/quantize/rounding/test_blockwise.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundation.schemes.int4 import Int4Scales, group_range
from foundation.schemes.int8 import DynamicScales, LayerScales
from quantize.rounding.autoround import Options, Sample, autoround
from quantize.rounding.blockwise import round_blocks, start_of, with_grid
from quantize.rounding.rounding import IntegerScales
from tests.quantize.rounding.test_rounding import Blocks, scales_of, send

pytestmark = pytest.mark.whole

OPTIONS = Options(10, 8, 0)


class Block(nn.Module):
    """A block with a mask among its arguments, and several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor, None]:
        return x + self.down(torch.relu(self.up(x * mask))), None


class Stack(nn.Module):
    """Blocks in a list; with `shared` the only one is called `depth` times."""

    def __init__(self, depth: int, *, shared: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body, self.turns = nn.ModuleList(Block() for _ in range(1 if shared else depth)), depth
        self.requires_grad_(False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for turn in range(self.turns):
            x, _ = self.body[turn % len(self.body)](x, mask=mask)
        return x


def layers_of(net: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear)}


def rows() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        yield {"x": torch.randn(4, 5, 8, generator=generator), "mask": (torch.rand(4, 5, 1, generator=generator) < 0.8).float()}


def forward(model: nn.Module, features: Mapping[str, Tensor]) -> object:
    return model(features["x"], features["mask"])


def grids_of(net: nn.Module) -> dict[str, IntegerScales]:
    grids = {name: group_range(layer.weight.detach(), 4) for name, layer in layers_of(net).items()}
    return {name: Int4Scales(grid.scale, 4, grid.zero_point) for name, grid in grids.items()}


def test_a_block_learns_the_float_output_from_the_inputs_of_the_rounded_blocks_before() -> None:
    net = Stack(3)
    layers, scales = layers_of(net), grids_of(net)
    rounded, found, figures = round_blocks(net, layers, scales, OPTIONS, [[name] for name in layers], rows, forward)
    assert layers_of(net) == layers
    assert [figure["name"] for figure in figures] == ["body.0", "body.1", "body.2"]
    batches = list(rows())
    floating = given = [batch["x"] for batch in batches]
    for number, block in enumerate(net.body):
        masks = [batch["mask"] for batch in batches]
        targets = [block(x, mask=mask)[0] for x, mask in zip(floating, masks, strict=True)]
        own = {name: layers[f"body.{number}.{name}"] for name in ("up", "down")}
        starts = {name: start_of(layer.weight.detach(), scales[f"body.{number}.{name}"]) for name, layer in own.items()}

        def run(block: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
            output: Tensor = block(x, mask=mask)[0]
            return output

        samples = [Sample(partial(run, block, x, mask), target, {}) for x, mask, target in zip(given, masks, targets, strict=True)]
        learned, nearest, error = autoround(block, own, starts, samples, OPTIONS)
        power = sum(float(target.square().sum()) for target in targets)
        assert figures[number]["error_nearest"] == pytest.approx(nearest / power)
        assert figures[number]["error"] == pytest.approx(error / power)
        for name, one in learned.items():
            assert torch.equal(rounded[f"body.{number}.{name}"].weight, one.weight(starts[name]))
            assert torch.equal(found[f"body.{number}.{name}"].weight_scale, one.grid.scale)
            assert rounded[f"body.{number}.{name}"].bias is own[name].bias
            setattr(block, name, rounded[f"body.{number}.{name}"])
        given, floating = [run(block, x, mask) for x, mask in zip(given, masks, strict=True)], targets


def test_a_layer_of_a_later_block_is_learned_there_even_if_it_reads_the_tensor_of_an_earlier_one() -> None:
    net = Stack(2)
    layers = layers_of(net)
    units = [["body.0.up", "body.1.up"], ["body.0.down"], ["body.1.down"]]
    _, _, figures = round_blocks(net, layers, grids_of(net), OPTIONS, units, rows, forward)
    assert [figure["name"] for figure in figures] == ["body.0", "body.1"]


def test_a_shared_block_is_learned_over_all_its_calls() -> None:
    net = Stack(3, shared=True)
    layers, scales = layers_of(net), grids_of(net)
    _, _, figures = round_blocks(net, layers, scales, OPTIONS, [[name] for name in layers], rows, forward)
    assert [figure["name"] for figure in figures] == ["body.0"]
    rounded, error, power = Stack(3, shared=True), 0.0, 0.0
    for name, layer in layers_of(rounded).items():
        layer.weight.data = scales[name].on_grid(layer.weight.detach())
    for batch in rows():
        x, mask = batch["x"], batch["mask"]
        for _ in range(3):
            target = net.body[0](x, mask=mask)[0]
            error += float((rounded.body[0](x, mask=mask)[0] - target).square().sum())
            power, x = power + float(target.square().sum()), target
    assert figures[0]["error_nearest"] == pytest.approx(error / power)


def test_the_layers_of_an_entry_that_is_never_called_are_learned_alone() -> None:
    net, x = Blocks(0, 2).requires_grad_(False), torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    layers = layers_of(net)
    scales: dict[str, Any] = {name: scales_of("w4a16, zero points", layer.weight.detach()) for name, layer in layers.items()}
    rounded, _, figures = round_blocks(net, layers, scales, OPTIONS, [[name] for name in layers], lambda: [{"x": x}], send)
    assert [figure["name"] for figure in figures] == list(layers) == list(rounded)
    assert all(figure["error"] <= figure["error_nearest"] for figure in figures)


def test_smoothing_and_the_scales_of_inputs_stay() -> None:
    weight_OI, smooth_I = torch.randn(3, 6), torch.linspace(0.5, 2, 6)
    for scales in (LayerScales(torch.ones(3), torch.tensor(0.05), 7, smooth_I), DynamicScales(torch.ones(3), 8, smooth_I)):
        start = start_of(weight_OI, scales)
        assert torch.equal(start.weight_OI, weight_OI * smooth_I)
        assert (start.low, start.high) == ((-63, 63) if scales.weight_bits == 7 else (-127, 127))
        learned = with_grid(scales, start.grid)
        assert torch.equal(learned.weight_scale, scales.weight_scale)
        assert {**scales.tensors(), **learned.tensors()}.keys() == scales.tensors().keys()
