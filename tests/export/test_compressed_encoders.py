"""Encoders in the format compressed-tensors: Transformers reads them back, and answers what the layers of the checkpoint answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from export import compressed_tensors
from export.folders.source import PLACE, Source
from export.folders.table import FORMATS
from foundation.core.errors import InputError
from foundation.models.folder import Checkpoint
from foundation.models.heads.embedding import EMBEDDING_KEY
from foundation.schemes.checkpoint import apply_quantization, load_quantization, save_quantization
from foundation.schemes.int8 import DynamicInt8Linear, quantize
from tests.export.test_compressed_tensors import ZERO_POINTS, scales_of, their_codes

pytestmark = pytest.mark.whole

SCRATCH = TemporaryDirectory(prefix="compressed-encoders-")
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}
MODERN = {**SIZES, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
MODELS: dict[str, Callable[[], Any]] = {
    "bert, vectors": lambda: transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False),
    "bert, classes": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)),
    "roberta, tags": lambda: transformers.RobertaForTokenClassification(transformers.RobertaConfig(**SIZES, num_labels=3)),
    "xlm-roberta, reranker": lambda: transformers.XLMRobertaForSequenceClassification(transformers.XLMRobertaConfig(**SIZES, num_labels=1)),
    "modernbert, classes": lambda: transformers.ModernBertForSequenceClassification(transformers.ModernBertConfig(**MODERN)),
}
CASES = [(model, scheme) for model in MODELS for scheme in ("w8a8", "w8a8-dynamic", "fp8")]
CASES += [("bert, classes", "w8a16"), ("bert, vectors", "w4a16"), ("bert, classes", ZERO_POINTS)]
IDS = torch.randint(4, 60, (3, 9), generator=torch.Generator().manual_seed(1))
HEADS = ("classifier", "head", "dense", "pooler", "out_proj")


def body_linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and ".layer" in f".{name}"}


def answer(model: Any) -> Tensor:
    """All hidden states of the last layer, and the answers of the head."""
    with torch.no_grad():
        found = model.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS), output_hidden_states=True)
    hidden: Tensor = found.hidden_states[-1]
    return torch.cat([hidden.flatten(), found.logits.flatten()]) if hasattr(found, "logits") else hidden.flatten()


@cache
def floating(kind: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    for parameter in model.parameters():
        parameter.data *= 5 if parameter.ndim > 1 else 1  # weights that give answers of size
    return model


@cache
def quantized(kind: str, scheme: str) -> Path:
    """A checkpoint whose layers are rounded."""
    model, folder = floating(kind), Path(SCRATCH.name) / f"{kind}-{scheme}"
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ranges: dict[str, float] = {}
    layers = body_linears(model)
    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: ranges.update({name: float(args[0].abs().max())}))
        for name, layer in layers.items()
    ]
    answer(model)
    scales = {name: scales_of(scheme, layer.weight.detach(), ranges[name]) for name, layer in layers.items()}
    for handle in handles:
        handle.remove()
    for name, layer in layers.items():
        layer.weight.data = scales[name].on_grid(layer.weight.detach())
    model.save_pretrained(folder)
    model.load_state_dict(original)
    (folder / "tokenizer.json").write_text("{}")
    save_quantization(folder, scales, {})
    return folder


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "scheme"), CASES)
def test_transformers_reads_it_back_and_answers_the_same(kind: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = quantized(kind, scheme)
    assert compressed_tensors.obstacle(Checkpoint(checkpoint)) is None
    compressed_tensors.write(Checkpoint(checkpoint), tmp_path / "out")
    monkeypatch.setattr(DynamicInt8Linear, "codes", their_codes)
    ours = type(floating(kind)).from_pretrained(checkpoint)
    apply_quantization(ours, checkpoint)
    auto = getattr(transformers, {"BertModel": "AutoModel", "RobertaForTokenClassification": "AutoModelForTokenClassification"}.get(
        type(ours).__name__, "AutoModelForSequenceClassification"))  # fmt: skip
    config = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if scheme == ZERO_POINTS else {}
    theirs, info = auto.from_pretrained(tmp_path / "out", output_loading_info=True, **config)
    expected, found = answer(ours), answer(theirs)
    rounded = (expected - answer(floating(kind))).abs().median()
    assert rounded > 0
    # A rounding that falls the other way is a step in one row; with the integers and scales of another model all rows differ.
    assert (found - expected).abs().median() < (1e-3 if "a16" in scheme else 0.1) * rounded
    assert not [name for name in info["missing_keys"] if "pooler" not in name]
    assert not info["unexpected_keys"]


@pytest.mark.parametrize("kind", MODELS)
def test_every_layer_that_stays_float_is_ignored(kind: str, tmp_path: Path) -> None:
    compressed_tensors.write(Checkpoint(quantized(kind, "w8a8")), tmp_path / "out")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    layers, _ = load_quantization(quantized(kind, "w8a8"))
    assert not set(ignored) & set(layers)
    others = {name for name, module in floating(kind).named_modules() if isinstance(module, nn.Linear)} - set(layers)
    assert others <= set(ignored)
    assert all(name.split(".")[0] in HEADS or name.split(".")[1] in HEADS for name in ignored)
    if kind == "bert, vectors":
        assert ignored == ["pooler.dense"]  # AutoModel builds it, though the checkpoint has no weights of it


def test_codes_are_the_integers_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = quantized("bert, classes", "w8a8")
    compressed_tensors.write(Checkpoint(checkpoint), tmp_path / "out")
    tensors, weights = load_file(tmp_path / "out" / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    for name, scales in load_quantization(checkpoint)[0].items():
        given = scales.tensors()
        codes = quantize(weights[f"{name}.weight"], given["weight_scale"][:, None], -127, 127)
        assert torch.equal(tensors[f"{name}.weight"], codes)
        assert torch.equal(tensors[f"{name}.weight_scale"][:, 0], given["weight_scale"])
        assert torch.equal(tensors[f"{name}.input_scale"], given["input_scale"].reshape(1))
        assert torch.equal(tensors[f"{name}.bias"], weights[f"{name}.bias"])
    assert torch.equal(tensors["classifier.weight"], weights["classifier.weight"])


def source(checkpoint: Path, task: Any) -> Source:
    return Source("quantize", Checkpoint(checkpoint), task, None, ())


def test_a_folder_of_an_embedder_has_the_modules_of_sentence_transformers(tmp_path: Path) -> None:
    import shutil

    checkpoint = tmp_path / "given"
    shutil.copytree(quantized("bert, vectors", "w4a16"), checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, EMBEDDING_KEY: {"pooling": "mean"}}))
    (checkpoint / "1_Pooling").mkdir()
    (checkpoint / "1_Pooling" / "config.json").write_text("{}")
    (checkpoint / "modules.json").write_text("[]")
    out = tmp_path / "out"
    out.mkdir()
    found = FORMATS["compressed-tensors"].write(source(checkpoint, "sentence-embedding"), out)
    assert {"modules.json", "1_Pooling/config.json", "model.safetensors", "tokenizer.json"} <= {
        file.relative_to(out).as_posix() for file in out.rglob("*.*")
    }
    assert found.library == "sentence-transformers"
    assert found.as_torch
    assert [snippet.title for snippet in found.snippets] == ["sentence-transformers"]


def test_snippets_load_the_folder(tmp_path: Path) -> None:
    for number, (kind, scheme) in enumerate((("bert, classes", "w8a8"), ("bert, classes", ZERO_POINTS))):
        out = tmp_path / str(number)
        out.mkdir()
        found = FORMATS["compressed-tensors"].write(source(quantized(kind, scheme), "text-classification"), out)
        code = "\n".join(line for line in found.snippets[0].code.splitlines() if not line.startswith(("tokenizer", "features", "outputs")))
        names: dict[str, Any] = {}
        exec(compile(code.replace(PLACE, str(out)), "snippet", "exec"), names)
        assert ("dequantize" in code) == (scheme == ZERO_POINTS)
        assert torch.isfinite(answer(names["model"])).all()


def test_a_snippet_of_vectors_with_zero_points_asks_for_float_weights(tmp_path: Path) -> None:
    found = FORMATS["compressed-tensors"].write(source(quantized("bert, vectors", ZERO_POINTS), "sentence-embedding"), tmp_path)
    code = found.snippets[0].code
    assert f'("{PLACE}", model_kwargs={{"quantization_config": CompressedTensorsConfig(dequantize=True)}})' in code
    assert "from transformers import CompressedTensorsConfig" in code
    compile(code, "snippet", "exec")


@pytest.mark.parametrize("task", ["image-classification", "text-to-text", "image-text"])
def test_other_models_are_refused(task: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no quantized text model"):
        FORMATS["compressed-tensors"].write(source(quantized("bert, classes", "w8a8"), task), tmp_path)
    assert not list(tmp_path.iterdir())
