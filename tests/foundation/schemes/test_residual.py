"""Which additions are those of a residual, and what is added then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from foundation.core.errors import InputError
from foundation.models.layers.conv1d import with_linears
from foundation.schemes.residual import RESIDUAL, Int8Residual, LayerOutput, mark
from foundation.schemes.sites import placed
from tests.foundation import tiny_transformers as tiny


class Counts(nn.Module):
    """Doubles what it is shown, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, residual: Tensor) -> Tensor:
        self.seen.append(residual.clone())
        return residual * 2


class Block(nn.Module):
    """x -> forward of two layers and the input."""

    def __init__(self, code: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.code = nn.Linear(4, 4), nn.Linear(4, 4), code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.first(x), self.second(x), x)


def run(code: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, list[Tensor], Block, Tensor]:
    """Returns the answer with a `Counts` behind the first layer, what it saw, the block and the input."""
    block, counts, x = Block(code).eval(), Counts(), torch.randn(2, 3, 4)
    with torch.inference_mode(), placed(block, {}, {"first": counts}):
        answer = block(x.clone())
    assert type(answer) is Tensor
    assert not block.first._forward_hooks
    assert not list(block.first.children())
    return answer, counts.seen, block, x


RESIDUALS = {
    "right": lambda y, _, x: y + x,
    "left": lambda y, _, x: x + y,
    "function": lambda y, _, x: torch.add(x, y),
    "in place": lambda y, _, x: x.clone().add_(y),
    "in place of the output": lambda y, _, x: y.add_(x),
    "past dropout": lambda y, _, x: functional.dropout(y, 0.1, training=False) + x,
    "past reshapes": lambda y, _, x: y.view(-1, 4).reshape(2, 3, 4).contiguous() + x,
    "past casts": lambda y, _, x: y.to(torch.float32) + x,
    "a look at the shape": lambda y, _, x: y.reshape(y.shape) + x.reshape(y.size()),
}
OTHERS = {
    "after GELU": lambda y, _, x: functional.gelu(y, approximate="tanh") + x,
    "GELU by tanh": lambda y, _, x: 0.5 * y * (1 + torch.tanh(y + 0.044715 * torch.pow(y, 3.0))),
    "two layers": lambda y, z, x: y + z,
    "a bias": lambda y, _, x: y + torch.ones(4),
    "a number": lambda y, _, x: y + 1.0,
    "a parameter": lambda y, _, x: y + nn.Parameter(torch.ones(2, 3, 4)),
    "integers": lambda y, _, x: y + torch.ones(2, 3, 4, dtype=torch.int64),
    "after a product": lambda y, _, x: 0.5 * y + x,
    "after a norm": lambda y, _, x: functional.layer_norm(y, (4,)) + x,
    "weighted": lambda y, _, x: torch.add(y, x, alpha=2),
    "the sum again": lambda y, _, x: (y.mul(1) + x) + x,
    "a difference": lambda y, _, x: y - x,
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_what_is_added_to_the_output_of_a_layer_goes_through_the_child(name: str) -> None:
    answer, seen, block, x = run(RESIDUALS[name])
    assert len(seen) == 1
    assert torch.equal(seen[0], x)
    torch.testing.assert_close(answer, block.first(x) + 2 * x)


@pytest.mark.parametrize("name", OTHERS)
def test_other_additions_stay_what_they_are(name: str) -> None:
    code = OTHERS[name]
    block, counts, x = Block(code).eval(), Counts(), torch.randn(2, 3, 4)
    if name == "two layers":  # both are marked
        with torch.inference_mode(), placed(block, {}, {"first": counts, "second": Counts()}):
            answer = block(x)
    else:
        answer, counts.seen, block, x = run(code)
    assert counts.seen == []
    torch.testing.assert_close(answer, block(x))


def test_the_mark_ends_with_the_addition() -> None:
    answer, seen, block, x = run(lambda y, _, x: (y + x) + x)
    assert len(seen) == 1
    torch.testing.assert_close(answer, block.first(x) + 3 * x)


def test_a_second_reader_of_the_output_sees_a_plain_addition() -> None:
    answer, seen, block, x = run(lambda y, _, x: (y + x) * (y + x))
    assert len(seen) == 1  # the graph of such a model has no single addition behind the layer, and export says so
    torch.testing.assert_close(answer, (block.first(x) + 2 * x) * (block.first(x) + x))


@given(st.integers(0, 2**31), st.floats(1e-3, 1.0))
def test_a_residual_is_rounded_to_its_grid_and_saturates(seed: int, scale: float) -> None:
    x = 50 * torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
    s = np.float32(scale)
    expected = np.clip(np.rint(x.numpy() / s), -128, 127).astype(np.float32) * s
    np.testing.assert_array_equal(Int8Residual("a", torch.tensor(scale))(x).numpy(), expected)


def test_the_type_of_a_residual_is_kept() -> None:
    assert Int8Residual("a", torch.tensor(0.1))(torch.randn(2, 3).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_residual_without_a_code_is_refused_by_name(bad: float) -> None:
    with pytest.raises(InputError, match=r"layer\.0/residual.*NaN or infinity"):
        Int8Residual("layer.0/residual", torch.tensor(1.0))(torch.tensor([0.0, bad]))


BEHIND = {  # by family: the layers whose output a residual is added to
    "bert": ("attention.output.dense", "output.dense"),
    "roberta": ("attention.output.dense", "output.dense"),
    "distilbert": ("attention.out_lin", "ffn.lin2"),
    "vit": ("attention.o_proj", "mlp.fc2"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_residuals_of_every_family_are_found(family: str) -> None:
    model = with_linears(tiny.model(family))
    blocks = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    children = {name: Counts() for name, module in model.named_modules() if isinstance(module, nn.Linear) and name.startswith(blocks)}
    with torch.inference_mode(), placed(model, {}, children):
        model(**tiny.features(family))
    found = [name for name, child in children.items() if child.seen]
    assert len(found) == 4
    assert [name for name in found if not name.endswith(BEHIND[family])] == []
    assert all(len(children[name].seen) == 1 for name in found)


def test_what_is_made_of_an_output_is_a_plain_tensor() -> None:
    block = Block(RESIDUALS["left"])
    block.first.add_module(RESIDUAL, Counts())
    marked = mark(block.first, (), torch.randn(2, 3))
    assert type(marked) is LayerOutput
    assert type(marked * 2) is Tensor
    assert type(marked.detach()) is Tensor
    assert [type(part) for part in marked.split(1)] == [Tensor, Tensor]
