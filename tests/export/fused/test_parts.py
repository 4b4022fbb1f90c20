"""The parts of an encoder, found by structure and proved by computing; what is built otherwise is refused in one line."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from benchmarks.gpu.references import unpack
from export.fused import parts
from export.fused.blocks import Otherwise, sparse_or_dense
from export.fused.parts import _relative, plan_of
from export.kernels.block_sparse import SparseWeight
from export.kernels.epilogue import Int8Weight
from foundation.core.errors import InputError
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.schemes.attention_products import ProductScales
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.int8 import DynamicScales, weight_scale
from foundation.schemes.sites import Sites, save_sites
from tests.export.fused import encoders
from tests.export.fused.encoders import SIZES, Shape
from tests.seldom import seldom

OTHERS = {
    "albert": transformers.AlbertConfig(**{**SIZES, "max_position_embeddings": 12}, embedding_size=64),
    "narrow electra": transformers.ElectraConfig(**{**SIZES, "max_position_embeddings": 12}, embedding_size=32),
    "modernbert": transformers.ModernBertConfig(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
    "gpt2": transformers.GPT2Config(vocab_size=50, n_positions=12, n_embd=64, n_layer=1, n_head=2, pad_token_id=0),
    "mish": transformers.BertConfig(**{**SIZES, "max_position_embeddings": 12, "hidden_act": "mish"}),
}  # fmt: skip
WHY = {
    "albert": "blocks for 2 layers",
    "narrow electra": "do not fit behind each other",
    "modernbert": "one layer makes its queries|changed before attention",
    "gpt2": "one layer makes its queries|changed before attention",
    "mish": "its activation is mish; gelu, gelu_tanh, relu, silu are written",
}


@pytest.mark.parametrize("family", seldom([name for name in encoders.CONFIGS if name != "t5"], ("roberta", "electra", "distilbert")))
def test_the_families_of_bert_are_found(family: str, tmp_path: Path) -> None:
    folder = encoders.checkpoint(tmp_path, Shape(family=family))
    plan, model = plan_of(Checkpoint(folder)), load(folder)
    assert [layer.name for layer in plan.linears] == [
        name for name, module in model.named_modules() if name and hasattr(module, "weight") and module.weight.ndim == 2
        and not isinstance(module, nn.Embedding)
    ]  # fmt: skip
    assert [after for _, after in plan.head.layers] == [
        {"bert": "tanh", "roberta": "tanh", "mpnet": "tanh", "electra": "gelu", "distilbert": "relu"}[family],
        "none",
    ]
    assert plan.first_position == (2 if family in ("roberta", "mpnet") else 0)
    assert (plan.relative is None) == (family != "mpnet")
    assert plan.longest == encoders.LENGTH
    assert [(block.heads, block.key_heads, block.head_dim) for block in plan.blocks] == [(2, 2, 32)] * 2
    for layer in plan.linears[:-2]:
        assert layer.is_int8
        module = model.get_submodule(layer.name)
        assert torch.equal(layer.weight.codes, module.weight)
        assert layer.input_scale == module.input_scale.item()


def looking_up(buckets: Tensor) -> tuple[Any, nn.Embedding]:
    """Returns a model that looks these up in its table."""
    table = nn.Embedding(32, 2)
    return type("Model", (nn.Module,), {"config": None, "forward": lambda _, input_ids: table(buckets)})(), table


def test_the_numbers_of_distances_are_those_that_a_model_looks_up() -> None:
    model = transformers.MPNetModel(transformers.MPNetConfig(**SIZES, max_position_embeddings=302)).eval()
    relative = _relative(model, model.encoder.relative_attention_bias, 300)
    tokens = torch.arange(300)
    with torch.inference_mode():
        every = model.encoder.compute_position_bias(torch.zeros(1, 300, 1))[0]
    assert torch.equal(relative[:, tokens[None, :] - tokens[:, None] + 299], every)
    assert len(relative[0].unique()) > 20


def test_relative_positions_that_depend_on_more_than_the_distance_are_refused() -> None:
    distances = torch.arange(5)[None, :] - torch.arange(5)[:, None] + 4
    assert _relative(*looking_up(distances), 5).shape == (2, 9)
    distances[2, 1] += 1
    with pytest.raises(Otherwise, match="the same distance"):
        _relative(*looking_up(distances), 5)
    with pytest.raises(Otherwise, match="every pair"):
        _relative(*looking_up(distances[:2]), 5)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_refused(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_config(OTHERS[name]).save_pretrained(tmp_path)
    quantized(tmp_path)
    with pytest.raises(InputError, match=rf"BERT.*({WHY[name]})"):
        plan_of(Checkpoint(tmp_path))


def test_modules_of_bert_that_compute_otherwise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, loaded = encoders.checkpoint(tmp_path), parts.load_float

    def scaled(path: Path) -> Any:
        model = loaded(path)
        model.get_submodule("bert.encoder.layer.0.output").register_forward_hook(lambda module, inputs, output: 1.1 * output)
        return model

    monkeypatch.setattr(parts, "load_float", scaled)
    with pytest.raises(InputError, match=r"modules of BERT or T5 and computes otherwise \(the closest"):
        plan_of(Checkpoint(folder))


def test_int8_products_of_attention_are_refused(tmp_path: Path) -> None:
    folder = encoders.checkpoint(tmp_path)
    save_sites(folder, Sites({"bert.encoder.layer.0.attention.self/qk": ProductScales(torch.tensor(0.1), torch.tensor(0.1))}))
    with pytest.raises(InputError, match=r"bert.encoder.layer.0.attention.self/qk .*; quantize without"):
        plan_of(Checkpoint(folder))


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    transformers.BertForSequenceClassification(encoders.CONFIGS["bert"]()).save_pretrained(tmp_path)
    quantized(tmp_path)
    with pytest.raises(InputError, match="is quantized as w8a8-dynamic; the fused kernels run w8a8"):
        plan_of(Checkpoint(tmp_path))


def quantized(folder: Path) -> None:
    """Adds the files of a checkpoint one of whose layers is of a scheme without static scales."""
    model = load(folder)
    name, layer = next((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    save_quantization(folder, {name: DynamicScales(weight_scale(layer.weight.data, 127), 8)}, {})


@pytest.mark.parametrize(("zeros", "side"), [(0, 0), (1, 0), (2, 64), (3, 64)])
def test_blocks_are_large_where_that_costs_little(zeros: int, side: int) -> None:
    codes = torch.randint(1, 100, (128, 128)).to(torch.int8)
    for number in range(zeros):
        codes[64 * (number // 2) :][:64, 64 * (number % 2) :][:, :64] = 0
    found = sparse_or_dense(codes, torch.ones(128), None)
    assert isinstance(found, SparseWeight if side else Int8Weight)
    if isinstance(found, SparseWeight):
        assert found.packed.side == side
        assert torch.equal(unpack(found.packed), codes)


def test_blocks_are_small_where_large_ones_are_never_all_zeros() -> None:
    codes = torch.randint(1, 100, (128, 128)).to(torch.int8)
    codes.view(2, 2, 32, 2, 2, 32)[:, 0, :, :, 1] = 0
    codes.view(2, 2, 32, 2, 2, 32)[:, 1, :, :, 0] = 0
    found = sparse_or_dense(codes, torch.ones(128), None)
    assert isinstance(found, SparseWeight)
    assert found.packed.side == 32
    assert torch.equal(unpack(found.packed), codes)
