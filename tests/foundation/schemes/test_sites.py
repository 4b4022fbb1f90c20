"""Sites in a model and in a checkpoint: what comes back, what is put back, what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.checkpoint import load
from foundation.schemes.attention_products import ATTENTION, IMPLEMENTATION, ProductScales
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.int8 import LayerScales, on_grid, weight_scale
from foundation.schemes.residual import RESIDUAL
from foundation.schemes.sites import Sites, apply_sites, load_sites, owner, placed, put, save_sites
from tests.foundation import tiny_transformers as tiny

SELF = "bert.encoder.layer.{}.attention.self"
DENSE = "bert.encoder.layer.{}.attention.output.dense"


def scales(*values: float) -> ProductScales:
    return ProductScales(*(torch.tensor(value) for value in values))


def some_sites() -> Sites:
    products = {f"{SELF.format(0)}/qk": scales(0.05, 0.04), f"{SELF.format(1)}/pv": scales(1 / 127, 0.03)}
    return Sites(products, {f"{DENSE.format(1)}/residual": torch.tensor(0.02)})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A BERT with one layer in int8 and the sites of `some_sites`."""
    model, name = tiny.model("bert"), DENSE.format(1)
    weight = model.get_submodule(name).weight.detach()
    scale_O = weight_scale(weight, 127)
    weight.copy_(on_grid(weight, scale_O, 127))
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    save_quantization(tmp_path, {name: LayerScales(scale_O, torch.tensor(0.03), 8)}, {"classifier": "head"})
    save_sites(tmp_path, some_sites())
    return tmp_path


def answer(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(**tiny.features("bert")).logits
    return logits


def test_sites_come_back(checkpoint: Path) -> None:
    found, given = load_sites(checkpoint), some_sites()
    assert found.names == given.names
    for name, expected in given.products.items():
        assert torch.equal(found.products[name].left, expected.left)
        assert torch.equal(found.products[name].right, expected.right)
    for name, scale in given.residuals.items():
        assert torch.equal(found.residuals[name], scale)
    document = json.loads((checkpoint / "quantization.json").read_text())
    assert document["products"] == list(given.products)
    assert document["residuals"] == list(given.residuals)
    assert list(document["layers"]) == [DENSE.format(1)]
    assert document["float_layers"] == {"classifier": "head"}


def test_saving_other_sites_replaces_the_list(checkpoint: Path) -> None:
    save_sites(checkpoint, some_sites().only([f"{SELF.format(0)}/qk"]))
    assert load_sites(checkpoint).names == [f"{SELF.format(0)}/qk"]


def test_a_checkpoint_without_sites_has_none(checkpoint: Path) -> None:
    path = checkpoint / "quantization.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in document.items() if key not in ("products", "residuals")}))
    assert load_sites(checkpoint).names == []
    assert load(checkpoint).config._attn_implementation == "sdpa"


def test_a_loaded_checkpoint_computes_its_sites(checkpoint: Path) -> None:
    model = load(checkpoint)
    plain_folder_answer = answer(model)
    save_sites(checkpoint, Sites())
    expected_model = load(checkpoint)
    without = answer(expected_model)
    assert not torch.equal(plain_folder_answer, without)
    with placed(expected_model, *some_sites().forms()):
        assert torch.equal(answer(expected_model), plain_folder_answer)
    assert torch.equal(answer(expected_model), without)


def test_every_site_changes_the_answer_by_itself(checkpoint: Path) -> None:
    save_sites(checkpoint, Sites())
    model = load(checkpoint)
    before, seen = answer(model), []
    for name in some_sites().names:
        with placed(model, *some_sites().only([name]).forms()):
            seen.append(answer(model))
        assert 0 < (seen[-1] - before).abs().max() < 0.2 * before.std()
    assert len({tuple(values.flatten().tolist()) for values in seen}) == 3


def test_nothing_is_left_in_the_model_after_an_error() -> None:
    model = tiny.model("bert")
    names, before = [name for name, _ in model.named_modules()], answer(model)
    with placed(model, *some_sites().forms()):
        assert model.config._attn_implementation == IMPLEMENTATION
        assert isinstance(model.get_submodule(f"{SELF.format(0)}.{ATTENTION}"), nn.Module)
        assert isinstance(model.get_submodule(f"{DENSE.format(1)}.{RESIDUAL}"), nn.Module)
    with pytest.raises(RuntimeError, match="no power"), placed(model, *some_sites().forms()):
        raise RuntimeError("no power")
    assert [name for name, _ in model.named_modules()] == names
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(answer(model), before)


def test_a_saved_model_stays_a_stock_one(tmp_path: Path) -> None:
    model = tiny.model("bert")
    keys = set(model.state_dict())
    put(model, *some_sites().forms())
    assert set(model.state_dict()) == keys
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert IMPLEMENTATION not in (tmp_path / "config.json").read_text()
    assert load(tmp_path).config._attn_implementation == "sdpa"


def test_a_copy_computes_the_same(checkpoint: Path) -> None:
    model = load(checkpoint)
    assert torch.equal(answer(copy.deepcopy(model)), answer(model))


def test_scales_go_where_the_model_goes(checkpoint: Path) -> None:
    attention, residuals = some_sites().forms()
    for form in (*attention.values(), *residuals.values()):
        assert {buffer.device.type for buffer in form.to("meta").buffers()} == {"meta"}
    assert answer(load(checkpoint, dtype=torch.bfloat16)).dtype == torch.bfloat16


def edit_json(folder: Path, **changes: object) -> None:
    path = folder / "quantization.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, name: str, value: Tensor) -> None:
    path = folder / "quantization.safetensors"
    save_file(load_file(path) | {name: value}, path)


QK, PV, ADDED = f"{SELF.format(0)}/qk", f"{SELF.format(1)}/pv", f"{DENSE.format(1)}/residual"
DAMAGE = {
    "no json": (lambda folder: (folder / "quantization.json").unlink(), "quantization.json"),
    "no scales": (lambda folder: (folder / "quantization.safetensors").unlink(), "quantization.safetensors"),
    "a product without scales": (lambda folder: edit_json(folder, products=[f"{SELF.format(0)}/pv"]), "left_scale"),
    "a residual without a scale": (lambda folder: edit_json(folder, residuals=["classifier/residual"]), "classifier/residual.scale"),
    "no such kind": (lambda folder: edit_json(folder, products=[SELF.format(0)]), "not the name of a site"),
    "a residual among products": (lambda folder: edit_json(folder, products=[ADDED]), "not the name of a site"),
    "a number": (lambda folder: edit_json(folder, products=3), "quantize again"),
    "a list of numbers": (lambda folder: edit_json(folder, residuals=[3]), "quantize again"),
    "a scale of zero": (lambda folder: edit_tensors(folder, f"{QK}.left_scale", torch.tensor(0.0)), "self/qk.*positive"),
    "a negative scale": (lambda folder: edit_tensors(folder, f"{PV}.right_scale", torch.tensor(-1.0)), "self/pv.*positive"),
    "an infinite scale": (lambda folder: edit_tensors(folder, f"{ADDED}.scale", torch.tensor(float("inf"))), "residual.*positive"),
    "a vector": (lambda folder: edit_tensors(folder, f"{QK}.right_scale", torch.ones(2)), "self/qk.*one for each tensor"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_in_one_line(checkpoint: Path, damage: str) -> None:
    change, expected = DAMAGE[damage]
    change(checkpoint)
    with pytest.raises(InputError, match=expected) as refused:
        apply_sites(tiny.model("bert"), checkpoint)
    assert len(refused.value.lines) == 1
    assert "\n" not in str(refused.value)


def test_sites_of_another_model_are_refused(checkpoint: Path) -> None:
    with pytest.raises(InputError, match=r"bert.encoder.layer.0.attention.self, .*not an attention"):
        apply_sites(tiny.model("roberta"), checkpoint)
    save_sites(checkpoint, Sites({"bert.embeddings/qk": scales(1.0, 1.0)}))
    with pytest.raises(InputError, match=r"names bert\.embeddings, which is not an attention module"):
        apply_sites(tiny.model("bert"), checkpoint)
    save_sites(checkpoint, Sites({}, {"classifier/residual": torch.tensor(1.0)}))
    with pytest.raises(InputError, match="names classifier, which is not a quantized layer"):
        load(checkpoint)


def test_the_owner_of_a_site_is_its_module() -> None:
    assert [owner(name) for name in some_sites().names] == [SELF.format(0), SELF.format(1), DENSE.format(1)]
