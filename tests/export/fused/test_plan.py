"""The file of a plan: everything comes back as it was; a damaged one is refused in one line."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from export.fused.parts import plan_of
from export.fused.plan import Plan, read_plan, write_plan
from foundation.core.errors import InputError
from foundation.models.folder import Checkpoint
from tests.export.fused import encoders
from tests.export.fused.encoders import Shape

EVERYTHING = Shape(floats=("0.output.dense",), smooth=("1.output.dense",), sparsity=0.6)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    nodes = {"a.b": {"input": "x", "codes": "q", "output": "y"}}
    return plan_of(Checkpoint(encoders.checkpoint(tmp_path_factory.mktemp("plan"), EVERYTHING)), nodes)


def test_everything_comes_back(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "plan")
    found = read_plan(tmp_path / "plan").to(torch.device("cpu"))
    for name in ("word", "kind", "position"):
        assert torch.equal(getattr(found, name), getattr(plan, name))
    assert (found.first_position, found.activation, found.nodes) == (plan.first_position, plan.activation, plan.nodes)
    norms = [(plan.norm, found.norm)]
    for block, other in zip(plan.blocks, found.blocks, strict=True):
        assert (other.head_dim, other.scaling) == (block.head_dim, block.scaling)
        norms += [(block.out_norm, other.out_norm), (block.ffn_norm, other.ffn_norm)]
    for norm, other in norms:
        assert torch.equal(norm.gain, other.gain)
        assert torch.equal(norm.bias, other.bias)
        assert (norm.eps, norm.centred) == (other.eps, other.centred)
    assert [after for _, after in found.head.layers] == [after for _, after in plan.head.layers]
    kinds = set()
    for layer, other in zip(plan.linears, found.linears, strict=True):
        kinds.add(f"{type(layer).__name__} {type(layer.weight).__name__}")
        assert (type(other), type(other.weight), other.name) == (type(layer), type(layer.weight), layer.name)
        tensors = layer.tensors()
        assert tensors.keys() == other.tensors().keys()
        for name, tensor in other.tensors().items():
            assert (tensor is None) == (tensors[name] is None)
            assert tensor is None or torch.equal(tensor, tensors[name])
        if layer.is_int8:
            assert other.input_scale == layer.input_scale
    assert kinds == {"FloatLinear Tensor", "Int8Linear SparseWeight"}
    assert sum(layer.tensors().get("smooth") is not None for layer in found.linears) == 1


def test_the_share_of_integers_is_that_of_what_is_stored(plan: Plan) -> None:
    blocks = sum(layer.weight.packed.codes.numel() for layer in plan.linears if layer.is_int8)
    floats = 64 * 96 + 64 * 64 + 3 * 64 + (50 + 2 + encoders.LENGTH) * 64  # a layer, the head, the tables
    assert plan.integer_share == blocks / (blocks + floats)
    assert 0 < blocks < 0.6 * 2 * (4 * 64 * 64 + 2 * 64 * 96)


def test_a_damaged_file_is_refused(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan"
    with pytest.raises(InputError, match="plan: cannot be used as a plan"):
        read_plan(path)
    path.write_bytes(b"no plan")
    with pytest.raises(InputError, match="cannot be used as a plan"):
        read_plan(path)
    write_plan(plan, path)
    save_file(load_file(path), path)
    with pytest.raises(InputError, match=r"cannot be used as a plan \(KeyError: 'plan'\); export again"):
        read_plan(path)
    save_file({}, path, {"plan": '{"format": 1}'})
    with pytest.raises(InputError, match="format 1; this version reads 4"):
        read_plan(path)


def test_tensors_that_do_not_fit_are_refused(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan"
    write_plan(replace(plan, norm=replace(plan.norm, bias=None)), path)
    assert read_plan(path).norm.bias is None
    write_plan(plan, path)
    tensors = load_file(path)
    document = {"plan": _document(path)}
    tensors["0.out_norm.gain"] = tensors["0.out_norm.gain"][:-1].clone()
    save_file(tensors, path, document)
    with pytest.raises(InputError, match=r"cannot be used as a plan .*bias: .* given; a contiguous tensor of float32, of shape \[63\]"):
        read_plan(path)


def _document(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return str(file.metadata()["plan"])
