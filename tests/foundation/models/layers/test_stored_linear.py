"""Linear layers whose weights stay in their files: the same products as a linear layer in memory, with the same factors, a part at a time.

python -m pytest tests/foundation/models/layers/test_stored_linear.py
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foundation.models.layers import stored_linear
from foundation.models.layers.stored_linear import StoredEmbedding, StoredLinear, WeightParts, held, rows_of
from foundation.schemes.int4 import Int4Scales, group_range, group_scale
from foundation.schemes.int8 import LayerScales, weight_scale

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(TYPES), st.booleans(), st.booleans(), st.lists(st.booleans(), max_size=3))
def test_as_a_layer_in_memory(outputs: int, inputs: int, dtype: torch.dtype, bias: bool, turned: bool, factors: list[bool]) -> None:
    stored_OI = random_of(outputs, inputs).to(dtype)
    stored_OI = stored_OI.T.contiguous().T if turned else stored_OI
    layer = nn.Linear(inputs, outputs, bias)
    layer.weight.data = stored_OI.float().contiguous()
    stored = StoredLinear(stored_OI, layer.bias.data.clone() if bias else None)
    for seed, of_inputs in enumerate(factors):
        factor = random_of(inputs if of_inputs else outputs, seed=seed).exp()
        if of_inputs:
            stored.multiply_inputs(factor)
            layer.weight.data = layer.weight.data * factor
        else:
            stored.divide_outputs(factor)
            layer.weight.data = layer.weight.data / factor[:, None]
            if bias:
                layer.bias.data = layer.bias.data / factor
    x = random_of(2, 3, inputs, seed=9)
    whole = stored(x)
    torch.testing.assert_close(whole, layer(x))
    assert torch.equal(stored.rows(0, outputs), layer.weight.data)  # every rounding in the same order
    patch = pytest.MonkeyPatch()
    with patch.context() as patched, torch.inference_mode():
        patched.setattr(stored_linear.StoredLinear.parts, "__defaults__", (4 * inputs * 2,))
        assert stored.parts() == [(i, min(i + 2, outputs)) for i in range(0, outputs, 2)]
        torch.testing.assert_close(stored(x), layer(x))
        assert torch.equal(torch.cat([stored.part(*span).weight for span in stored.parts()]), layer.weight.data)
    stored.load()
    assert torch.equal(stored.weight, layer.weight)
    stored.multiply_inputs(torch.full((inputs,), 2.0))
    assert torch.equal(stored.weight, 2 * layer.weight)


def test_float32_is_used_without_a_copy() -> None:
    weight_OI = random_of(4, 6)
    stored = StoredLinear(weight_OI, None)
    assert stored.rows(1, 3).data_ptr() == weight_OI[1].data_ptr()
    assert stored.is_plain
    stored.multiply_inputs(torch.ones(6))
    assert not stored.is_plain
    assert not StoredLinear(weight_OI.T, None).is_plain
    assert not StoredLinear(weight_OI.bfloat16(), None).is_plain


@pytest.mark.parametrize("kind", ["w8a8", "w4a16", "w4a16, zero points"])
def test_a_grid_takes_the_rounding_of_the_type_out(kind: str) -> None:
    weight_OI = random_of(6, 40)
    ranges = group_range(weight_OI, 16)
    scales = {
        "w8a8": LayerScales(weight_scale(weight_OI, 127), torch.ones(()), 8),
        "w4a16": Int4Scales(group_scale(weight_OI, 16), 16),
        "w4a16, zero points": Int4Scales(ranges.scale, 16, ranges.zero_point),
    }[kind]
    grid_OI = scales.on_grid(weight_OI)
    stored = StoredLinear(weight_OI.bfloat16(), None)
    stored.multiply_inputs(torch.ones(40))
    stored.store(grid_OI.bfloat16(), scales)
    assert not torch.equal(grid_OI.bfloat16().float(), grid_OI)
    assert torch.equal(torch.cat([stored.rows(i, i + 1) for i in range(6)]), grid_OI)
    assert torch.equal(rows_of(scales, 2, 5).on_grid(weight_OI[2:5]), grid_OI[2:5])


def test_function_modes_see_a_linear_layer() -> None:
    seen: list[tuple[str, Tensor]] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append((func.__name__, args))
            return func(*args, **(kwargs or {}))

    stored = StoredLinear(random_of(3, 4).bfloat16(), None)
    with Recorder():
        stored(random_of(2, 4))
    calls = [args for name, args in seen if name == "linear"]
    assert len(calls) == 1
    assert calls[0][1] is stored.weight


def test_weights_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_linear, "ROUND_BYTES", 4 * 7 * 2)
    plain, stored = nn.Linear(7, 5), StoredLinear(random_of(5, 7).half(), None)
    parts = WeightParts([plain, stored])
    for _ in range(2):  # made anew by each pass
        assert [tuple(part.shape) for part in parts] == [(5, 7), (2, 7), (2, 7), (1, 7)]
    assert torch.equal(torch.cat(list(parts)), torch.cat([plain.weight, stored.weight.float()]))


def test_an_embedding_gives_float32() -> None:
    table = nn.Embedding(9, 4, padding_idx=0)
    expected = table(torch.tensor([[1, 0, 8]]))
    table.__class__ = StoredEmbedding
    table.weight = nn.Parameter(table.weight.detach().bfloat16(), requires_grad=False)
    found = table(torch.tensor([[1, 0, 8]]))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=0, rtol=2**-8)


@pytest.mark.parametrize(("most_bytes", "keeps"), [(4 * 6 * 4, True), (4 * 6 * 4 - 1, False)])
def test_rows_are_made_once_for_a_pass_where_they_fit(most_bytes: int, keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = StoredLinear(random_of(6, 4).bfloat16(), random_of(6)), random_of(3, 4, seed=1)
    layer.multiply_inputs(random_of(4, seed=2).exp())
    before, made = layer(x), list[tuple[int, int]]()
    rows = StoredLinear.rows

    def counted(self: StoredLinear, start: int, stop: int) -> Tensor:
        made.append((start, stop))
        return rows(self, start, stop)

    monkeypatch.setattr(StoredLinear, "rows", counted)
    with held(nn.ModuleList([layer]), most_bytes):
        for _ in range(3):
            torch.testing.assert_close(layer(x), before)
    assert len(made) == (1 if keeps else 3)
    layer.multiply_inputs(torch.full((4,), 2.0))
    torch.testing.assert_close(layer(x) - layer.bias, 2 * (before - layer.bias))
