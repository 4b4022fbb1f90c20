"""What ONNX Runtime multiplies integer blocks by, read off a product, against products of random numbers."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from export.engines import block_products
from export.engines.block_products import reported, rounds_inputs
from foundation.schemes.int4_by_int8 import in_blocks

CASES = [(4, 16, 1), (4, 32, 1), (4, 128, 1), (4, 32, 0), (4, 32, 4), (4, 128, 4), (8, 32, 1), (8, 32, 4), (8, 64, 4)]


def product(bits: int, block: int, level: int) -> tuple[onnx.ModelProto, np.ndarray]:
    """A product with random codes in two blocks, and its weights."""
    random = np.random.default_rng(bits + block)
    codes = random.integers(0, 1 << bits, (5, 2, block), dtype=np.uint8)
    stored = codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)
    scale = (0.5 + random.random((5, 2))).astype(np.float32)
    sizes = {"N": 5, "K": 2 * block, "bits": bits, "block_size": block, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["x", "codes", "scale"], ["y"], domain="com.microsoft", **sizes)
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2 * block])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(stored, "codes"), numpy_helper.from_array(scale, "scale")],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    weight = (codes.astype(np.float32) - (1 << (bits - 1))) * scale[..., None]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), weight.reshape(5, -1)


@pytest.mark.parametrize(("bits", "block", "level"), CASES)
def test_what_is_read_off_is_what_products_do(bits: int, block: int, level: int) -> None:
    model, weight = product(bits, block, level)
    x = torch.randn(3, 2 * block, generator=torch.Generator().manual_seed(0))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": x.numpy()})[0]
    rounded, exact = in_blocks(x, block).numpy() @ weight.T, x.numpy() @ weight.T
    error = {True: float(np.abs(found - rounded).max()), False: float(np.abs(found - exact).max())}
    rounds = rounds_inputs(bits, block, level)
    assert error[rounds] < error[not rounds] / 10
    (told,) = reported(model.graph.node).items()
    assert told[0] == f"products of {bits}-bit codes in blocks of {block}"
    assert told[1] == f"accuracy_level {level}, inputs in {'int8' if rounds else 'float32'}"


def test_float_is_read_off_where_float_is_asked_for() -> None:
    assert not any(rounds_inputs(bits, block, level) for bits, block, level in CASES if level != 4)


def test_a_product_that_is_neither_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_products, "LARGE", 50.0)  # 0.25 is then above half a step of 50 / 127
    with pytest.raises(ValueError, match="8 bits in blocks of 16 at accuracy_level 4"):
        rounds_inputs.__wrapped__(8, 16, 4)
