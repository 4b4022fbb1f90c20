"""True int8 against naive integers, and the checkpoint format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.schemes import checkpoint, int8
from foundation.schemes.int8 import Int8Linear, LayerScales, int8_matmul, levels, on_grid, quantize, weight_bits, weight_scale
from foundation.schemes.scales import SMALLEST_SCALE

CPUINFO = "processor\t: 0\nmodel name\t: a\nflags\t\t: fpu avx2 {}\n"
FLOATS = st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32)


def naive_matmul(a_NI: Tensor, b_OI: Tensor) -> Tensor:
    return torch.from_numpy(a_NI.numpy().astype(np.int64) @ b_OI.numpy().astype(np.int64).T)


def random_codes(seed: int, *shape: int, low: int = -128) -> Tensor:
    return torch.randint(low, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def naive_linear(x_NI: Tensor, weight_OI: Tensor, weight_scale_O: Tensor, input_scale: float, bias_O: Tensor) -> np.ndarray:
    """One output at a time, integers in Python, the rescale in float32."""
    rows, outputs = len(x_NI), len(weight_OI)
    y = np.zeros((rows, outputs), np.float32)
    for n in range(rows):
        q = [max(-128, min(127, int(np.rint(value / np.float32(input_scale))))) for value in x_NI[n].numpy()]
        for o in range(outputs):
            total = sum(a * int(b) for a, b in zip(q, weight_OI[o], strict=True))
            y[n, o] = np.float32(total) * (np.float32(input_scale) * weight_scale_O[o].numpy()) + bias_O[o].numpy()
    return y


@pytest.mark.parametrize("kernel", [int8_matmul, int8._int_mm])
@given(n=st.integers(1, 40), inputs=st.integers(1, 70), outputs=st.integers(1, 40), seed=st.integers(0, 99))
def test_matmul_equals_naive_integers(kernel, n: int, inputs: int, outputs: int, seed: int) -> None:
    a, b = random_codes(seed, n, inputs), random_codes(seed + 1, outputs, inputs)
    product = kernel(a, b)
    assert product.dtype == torch.int32
    assert torch.equal(product.long(), naive_matmul(a, b))


@pytest.mark.parametrize("inputs", [1, 31, 32, 1023, 1024, 1025, 2048, 5000, 40_000])
@pytest.mark.parametrize(("left", "right"), [(-128, 127), (-128, -127), (127, 127), (-128, -128), (127, -63)])
def test_the_largest_products_never_round_or_saturate(inputs: int, left: int, right: int) -> None:
    a, b = torch.full((3, inputs), left, dtype=torch.int8), torch.full((2, inputs), right, dtype=torch.int8)
    b[1, 0] = 1  # an odd sum close to the largest one shows a lost last bit
    expected = torch.tensor([[left * right * inputs, left * right * (inputs - 1) + left]]).expand(3, 2)
    assert torch.equal(int8_matmul(a, b).long(), expected)


def test_a_chunk_never_leaves_the_exact_integers_of_float32() -> None:
    assert int8.EXACT_CHUNK * 128 * 128 <= 2**24


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_empty_matrices_multiply(shape: tuple[int, int, int]) -> None:
    n, inputs, outputs = shape
    product = int8_matmul(torch.zeros(n, inputs, dtype=torch.int8), torch.zeros(outputs, inputs, dtype=torch.int8))
    assert product.shape == (n, outputs)
    assert product.dtype == torch.int32
    assert not product.any()


def test_strided_codes_multiply_like_contiguous_ones() -> None:
    a, b = random_codes(0, 33, 20).T, random_codes(1, 33, 12).T
    assert torch.equal(int8_matmul(a, b).long(), naive_matmul(a, b))
    assert torch.equal(int8._int_mm(a, b).long(), naive_matmul(a, b))


@given(hnp.arrays(np.float32, st.integers(0, 50), elements=FLOATS), st.floats(2.0**-63, 2.0**20, width=32))
def test_codes_are_those_of_onnx_quantize_linear(x: np.ndarray, scale: float) -> None:
    with np.errstate(over="ignore"):
        expected = np.clip(np.rint(x / np.float32(scale)), -128, 127).astype(np.int8)
    assert np.array_equal(quantize(torch.from_numpy(x), torch.tensor(scale), -128, 127).numpy(), expected)


def test_halves_round_to_even_and_codes_saturate() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1000.0, -128.5, -129.0])
    assert quantize(x, torch.tensor(1.0), -128, 127).tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -128, -128]


@pytest.mark.parametrize("bits", [8, 7])
@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=8), elements=FLOATS))
def test_grid_weights_give_their_codes_back(bits: int, weight: np.ndarray) -> None:
    weight_OI, largest = torch.from_numpy(weight), levels(bits)
    scale_O = weight_scale(weight_OI, largest)
    assert ((scale_O >= SMALLEST_SCALE) & scale_O.isfinite()).all()
    codes_OI = quantize(weight_OI, scale_O[:, None], -largest, largest)
    grid_OI = on_grid(weight_OI, scale_O, largest)
    assert torch.equal(torch.round(grid_OI / scale_O[:, None]), codes_OI.float())
    assert codes_OI.abs().max() <= largest
    assert torch.equal(on_grid(grid_OI, scale_O, largest), grid_OI)


@given(st.integers(-127, 127), st.floats(2.0**-63, 2.0**100, width=32))
def test_any_code_survives_any_scale(code: int, scale: float) -> None:
    weight = torch.tensor([float(code)]) * torch.tensor(scale)
    assert torch.round(weight / torch.tensor(scale)).item() == code


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38])
def test_a_scale_is_never_zero_nor_infinite(value: float) -> None:
    scale = weight_scale(torch.full((1, 4), value), 127)
    assert 0 < scale.item() < float("inf")
    assert (scale * SMALLEST_SCALE).item() >= torch.finfo(torch.float32).tiny
    assert torch.isfinite(on_grid(torch.full((1, 4), value), scale, 127)).all()


def test_a_layer_without_inputs_has_scales() -> None:
    assert weight_scale(torch.zeros(3, 0), 127).tolist() == [1, 1, 1]


def layer(seed: int = 0, inputs: int = 7, outputs: int = 5, bits: int = 8) -> Int8Linear:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    scale = weight_scale(weight, levels(bits))
    codes = quantize(weight, scale[:, None], -levels(bits), levels(bits))
    return Int8Linear("encoder.0.query", codes, LayerScales(scale, torch.tensor(0.03), bits), torch.randn(outputs, generator=generator))


@pytest.mark.parametrize("bits", [8, 7])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1, 1), (3, 7, 5), (2, 33, 1), (20, 40, 9)])
def test_a_layer_equals_the_written_out_one(bits: int, rows: int, inputs: int, outputs: int) -> None:
    int8_layer = layer(rows, inputs, outputs, bits)
    x = 4 * torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))
    assert int8_layer.bias is not None
    expected = naive_linear(x, int8_layer.weight, int8_layer.weight_scale, float(int8_layer.input_scale), int8_layer.bias)
    assert np.array_equal(int8_layer(x).numpy(), expected)


def test_a_smoothed_layer_divides_its_input_and_equals_the_plain_one() -> None:
    generator, smooth = torch.Generator().manual_seed(0), torch.tensor([1.0, 2.0, 0.5, 4.0, 0.25, 8.0, 1.0])
    linear, x = nn.Linear(7, 5), torch.randn(9, 7, generator=generator)
    scales = LayerScales(weight_scale(linear.weight.detach() * smooth, 127), torch.tensor(0.03), 8, smooth)
    smoothed = int8.int8_linear("a", linear, scales)
    plain = nn.Linear(7, 5)
    plain.weight.data, plain.bias.data = linear.weight.detach() * smooth, linear.bias.detach()
    expected = int8.int8_linear("a", plain, LayerScales(scales.weight_scale, scales.input_scale, 8))
    assert torch.equal(smoothed.codes(x), expected.codes(x / smooth))
    assert torch.equal(smoothed(x), expected(x / smooth))
    assert not torch.equal(smoothed(x), expected(x))


@given(st.integers(0, 2**31), st.sampled_from([7, 8]), st.floats(0, 4))
def test_smoothed_grid_weights_give_their_codes_back(seed: int, bits: int, spread: float) -> None:
    generator, linear = torch.Generator().manual_seed(seed), nn.Linear(6, 4)
    smooth = torch.exp(spread * torch.randn(6, generator=generator))
    scales = LayerScales(weight_scale(linear.weight.detach() * smooth, levels(bits)), torch.tensor(1.0), bits, smooth)
    codes = int8.int8_linear("a", linear, scales).weight
    linear.weight.data = int8.on_grid_of(linear.weight.detach(), scales)
    assert torch.equal(int8.int8_linear("a", linear, scales).weight, codes)
    assert codes.abs().max() == levels(bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_smoothed_checkpoint_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    model, scales = Pair(), {}
    for name, linear in list(model.encoder.named_children()):
        smooth = torch.linspace(0.1, 10, linear.in_features)
        weight = weight_scale(linear.weight.detach() * smooth, 127)
        scales[f"encoder.{name}"] = LayerScales(weight, torch.tensor(0.02), 8, smooth if name == "0" else None)
        if name == "1":
            scales["encoder.1"] = LayerScales(weight_scale(linear.weight.detach(), 127), torch.tensor(0.02), 8)
    codes = {name: int8.int8_linear(name, model.get_submodule(name), found).weight for name, found in scales.items()}
    for name, found in scales.items():
        linear = model.get_submodule(name)
        linear.weight.data = int8.on_grid_of(linear.weight.detach(), found)
    checkpoint.save_quantization(tmp_path, scales, {})
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded, _ = checkpoint.load_quantization(tmp_path)
    assert torch.equal(loaded["encoder.0"].input_smooth, scales["encoder.0"].input_smooth)
    assert loaded["encoder.1"].input_smooth is None
    checkpoint.apply_quantization(model.to(dtype), tmp_path)
    for name in scales:
        assert torch.equal(model.get_submodule(name).weight, codes[name])
    assert model(torch.randn(3, 6, dtype=dtype)).dtype == dtype


def test_a_layer_keeps_leading_dimensions_and_the_type_of_its_input() -> None:
    int8_layer, x = layer(), torch.randn(2, 3, 7)
    assert int8_layer(x).shape == (2, 3, 5)
    assert torch.equal(int8_layer(x)[1], int8_layer(x[1]))
    assert int8_layer(x[:0]).shape == (0, 3, 5)
    assert int8_layer(x.bfloat16()).dtype == torch.bfloat16


def test_the_rounding_error_of_a_layer_is_bounded() -> None:
    int8_layer, x = layer(inputs=64), torch.rand(50, 64) * 2 - 1
    weight = int8_layer.weight.float() * int8_layer.weight_scale[:, None]
    exact = nn.functional.linear(x.double(), weight.double(), int8_layer.bias.double())  # type: ignore[union-attr]
    bound = float(int8_layer.input_scale) / 2 * weight.abs().sum(dim=1)
    assert ((int8_layer(x).double() - exact).abs() <= bound + 1e-5).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_input_without_a_code_is_refused_by_name(bad: float) -> None:
    x = torch.zeros(2, 7)
    x[1, 3] = bad
    with pytest.raises(InputError, match=r"encoder\.0\.query.*NaN or infinity"):
        layer()(x)


def test_opposite_infinities_do_not_cancel_and_huge_values_pass() -> None:
    x = torch.zeros(1, 7)
    x[0, 0], x[0, 1] = float("inf"), -float("inf")
    with pytest.raises(InputError):
        layer()(x)
    assert torch.isfinite(layer()(torch.full((1, 7), 3e38))).all()


@pytest.mark.parametrize(("flags", "native"), [("avx512f", False), ("avx512_vnni", True), ("avx_vnni", True), ("amx_int8", True)])
def test_vnni_is_read_from_the_flags(flags: str, native: bool) -> None:
    found = int8._cpu_flags(CPUINFO.format(flags) + CPUINFO.format("avx512_vnni"))
    assert (not int8.NATIVE_INT8.isdisjoint(found)) == native
    assert int8._cpu_flags("Processor : AArch64 avx512_vnni") == []


def test_weights_have_seven_bits_only_where_kernels_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "has_vnni", lambda: False)
    assert (weight_bits("cpu"), weight_bits("cuda")) == (7, 8)
    monkeypatch.setattr(int8, "has_vnni", lambda: True)
    assert (weight_bits("cpu"), weight_bits("cuda")) == (8, 8)
    assert 255 * levels(7) * 2 <= 2**15 - 1 < 255 * levels(8) * 2


def test_with_vnni_the_integer_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(int8, "has_vnni", lambda: True)
    monkeypatch.setattr(int8, "_int_mm", lambda a, b: called.append(a.shape) or naive_matmul(a, b).int())
    int8_matmul(random_codes(0, 2, 3), random_codes(1, 4, 3))
    assert called == [(2, 3)]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3, bias=False))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.encoder(x))
        return y


def quantized(folder: Path) -> tuple[Pair, dict[str, LayerScales]]:
    """Rounds the encoder of a `Pair` to its grids, one layer with 8 bits and one with 7, and writes the two files."""
    model, scales = Pair(), {}
    for name, bits in (("encoder.0", 8), ("encoder.1", 7)):
        weight = model.get_submodule(name).weight.detach()
        scales[name] = LayerScales(weight_scale(weight, levels(bits)), torch.tensor(0.02), bits)
        weight.copy_(on_grid(weight, scales[name].weight_scale, levels(bits)))
    checkpoint.save_quantization(folder, scales, {"head": "head"})
    save_file(model.state_dict(), folder / "model.safetensors")
    return model, scales


def test_scales_and_reasons_come_back(tmp_path: Path) -> None:
    _, scales = quantized(tmp_path)
    layers, float_layers = checkpoint.load_quantization(tmp_path)
    assert float_layers == {"head": "head"}
    assert list(layers) == ["encoder.0", "encoder.1"]
    for name, expected in scales.items():
        assert torch.equal(layers[name].weight_scale, expected.weight_scale)
        assert layers[name].input_scale.shape == ()
        assert layers[name].weight_bits == expected.weight_bits
    document = json.loads((tmp_path / "quantization.json").read_text())
    assert (document["schema"], document["scheme"], document["weight_bits"]) == (1, "w8a8", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_applying_recovers_the_exact_codes(tmp_path: Path, dtype: torch.dtype) -> None:
    model, scales = quantized(tmp_path)
    weights = {name: model.get_submodule(name).weight.detach().clone() for name in scales}
    model.to(dtype)
    checkpoint.apply_quantization(model, tmp_path)
    for name, weight in weights.items():
        int8_layer = model.get_submodule(name)
        assert isinstance(int8_layer, Int8Linear)
        assert torch.equal(int8_layer.weight.float() * scales[name].weight_scale[:, None], weight)
    assert isinstance(model.head, nn.Linear)
    assert model(torch.randn(3, 6, dtype=dtype)).shape == (3, 2)


def test_codes_of_seven_bits_end_at_63(tmp_path: Path) -> None:
    model, _ = quantized(tmp_path)
    checkpoint.apply_quantization(model, tmp_path)
    assert [int(model.encoder[i].weight.abs().max()) for i in range(2)] == [127, 63]


def edit_json(folder: Path, **changes: object) -> None:
    path = folder / "quantization.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, **changes: Tensor) -> None:
    path = folder / "quantization.safetensors"
    save_file(load_file(path) | {name.replace("__", "."): value for name, value in changes.items()}, path)


DAMAGE = {
    "no json": (lambda folder: (folder / "quantization.json").unlink(), "quantization.json"),
    "no scales": (lambda folder: (folder / "quantization.safetensors").unlink(), "quantization.safetensors"),
    "truncated scales": (lambda folder: (folder / "quantization.safetensors").write_bytes(b"\x08\0\0\0"), "quantization.safetensors"),
    "half a json": (lambda folder: (folder / "quantization.json").write_text('{"schema": 1'), "quantization.json"),
    "a list": (lambda folder: (folder / "quantization.json").write_text("[]"), "quantization.json"),
    "a newer schema": (lambda folder: edit_json(folder, schema=2), "schema 2"),
    "other bits": (lambda folder: edit_json(folder, layers={"encoder.0": {"weight_bits": 4}}), "weight_bits"),
    "a layer without scales": (lambda folder: edit_json(folder, layers={"head": {"weight_bits": 8}}), "head.weight_scale"),
    "scales of zero": (lambda folder: edit_tensors(folder, encoder__0__weight_scale=torch.zeros(4)), "encoder.0.*positive"),
    "a scale of infinity": (lambda folder: edit_tensors(folder, encoder__0__input_scale=torch.tensor(float("inf"))), "encoder.0.*positive"),
    "too few scales": (lambda folder: edit_tensors(folder, encoder__0__weight_scale=torch.ones(3)), "encoder.0.*each output"),
    "a smoothing of zero": (lambda folder: edit_tensors(folder, encoder__0__input_smooth=torch.zeros(6)), "encoder.0.*positive"),
    "too short a smoothing": (lambda folder: edit_tensors(folder, encoder__0__input_smooth=torch.ones(5)), "encoder.0.*each output"),
    "a smoothing without end": (
        lambda folder: edit_tensors(folder, encoder__0__input_smooth=torch.full((6,), 1e-40)),
        "encoder.0.*positive",
    ),
    "another smoothing": (
        lambda folder: edit_tensors(folder, encoder__0__input_smooth=torch.full((6,), 1.1)),
        "encoder.0.*not on the grid",
    ),
    "other scales": (lambda folder: edit_tensors(folder, encoder__0__weight_scale=torch.full((4,), 0.0321)), "encoder.0.*not on the grid"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    model, _ = quantized(tmp_path)
    change, expected = DAMAGE[damage]
    change(tmp_path)
    with pytest.raises(InputError, match=expected) as refused:
        checkpoint.apply_quantization(model, tmp_path)
    assert len(refused.value.lines) == 1
    assert "\n" not in str(refused.value)


def test_scales_of_another_model_are_refused(tmp_path: Path) -> None:
    model, _ = quantized(tmp_path)
    model.encoder = nn.Sequential(nn.Identity(), nn.Identity())
    with pytest.raises(InputError, match=r"encoder\.0.*not a linear layer"):
        checkpoint.apply_quantization(model, tmp_path)


def test_weights_changed_after_quantization_are_refused(tmp_path: Path) -> None:
    model, _ = quantized(tmp_path)
    model.encoder[1].weight.data += 0.001
    with pytest.raises(InputError, match=r"encoder\.1.*not on the grid"):
        checkpoint.apply_quantization(model, tmp_path)


def dynamic(seed: int, inputs: int, outputs: int, smooth: Tensor | None = None) -> int8.DynamicInt8Linear:
    generator, linear = torch.Generator().manual_seed(seed), nn.Linear(inputs, outputs)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    smoothed = linear.weight.detach() * (1 if smooth is None else smooth)
    return int8.DynamicScales(weight_scale(smoothed, 127), 8, smooth).module("encoder.0.query", linear)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1, 1), (3, 7, 5), (2, 33, 1), (20, 40, 9)])
def test_a_dynamic_layer_equals_the_written_out_one(rows: int, inputs: int, outputs: int) -> None:
    layer, x = dynamic(rows, inputs, outputs), torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))
    x *= torch.logspace(-6, 6, rows)[:, None]
    x[-1] = 0 if rows > 1 else x[-1]
    expected = np.zeros((rows, outputs), np.float32)
    for n in range(rows):
        scale = max(np.float32(np.abs(x[n].numpy()).max() / np.float32(127)), np.float32(SMALLEST_SCALE))
        codes = np.rint(x[n].numpy() / scale).astype(np.int64)
        assert np.abs(codes).max() == (127 if x[n].any() else 0)
        for o in range(outputs):
            total = int(codes @ layer.weight[o].numpy().astype(np.int64))
            expected[n, o] = np.float32(total) * scale * np.float32(layer.weight_scale[o]) + np.float32(layer.bias[o])
    assert np.array_equal(layer(x).numpy(), expected)


def test_a_token_does_not_know_of_the_others() -> None:
    layer, x = dynamic(0, 12, 5), torch.randn(4, 3, 12)
    whole = layer(x)
    x[0] *= 1e4
    assert torch.equal(layer(x)[1:], whole[1:])
    assert torch.equal(layer(x[2, 1]), whole[2, 1])
    assert layer(x[:0]).shape == (0, 3, 5)
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_a_smoothed_dynamic_layer_divides_its_input() -> None:
    smooth, x = torch.tensor([1.0, 2.0, 0.5, 4.0]), torch.randn(6, 4)
    smoothed = dynamic(0, 4, 3, smooth)
    codes, scale = smoothed.codes(x)
    assert torch.equal(scale, int8.token_scale(x * smooth.reciprocal()))
    assert torch.equal(codes, torch.round(x * smooth.reciprocal() / scale).to(torch.int8))


def test_a_dynamic_layer_refuses_what_has_no_code_by_name() -> None:
    with pytest.raises(InputError, match=r"encoder\.0\.query.*NaN or infinity"):
        dynamic(0, 4, 3)(torch.tensor([[0.0, 1, torch.nan, 2]]))
