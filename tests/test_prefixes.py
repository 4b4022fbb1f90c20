"""Models with a learned prefix in every later stage: cut, rotated, rounded, exported and served, or refused in one line.

python -m pytest tests/test_prefixes.py
python -m pytest tests/test_prefixes.py -m slow     # whole runs
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from compress.commands.plan import plan
from compress.pipeline import run
from compress.recipe import check
from export.compressed_tensors import obstacle
from export.fused.parts import plan_of
from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.labels.tasks import Task
from foundation.models.architecture.shapes import auto_class
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load, save
from foundation.models.config import set_labels
from foundation.models.folder import Checkpoint
from foundation.models.heads.embedding import EMBEDDING_KEY
from foundation.models.layers.conv1d import with_linears
from foundation.models.library import with_class
from foundation.models.own_shape import prefix_of
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.int8 import LayerScales, levels, on_grid, weight_scale
from foundation.stage.context import Context
from foundation.training.few_parameters.prefix_tuning import PrefixTuning, with_prefix
from foundation.training.few_parameters.prefix_tuning import prefixed as tuning
from prune.sparsify.slices import bundles
from prune.surgery import KeptUnits, shrink
from quantize.folding import find_folds
from quantize.quantize import Quantize
from quantize.rotation.rotation import rotate
from tests.distill.conftest import checkpoint, make_context, make_model, told  # noqa: F401 - fixtures
from tests.export import sentiment
from tests.foundation.models.layers.test_prefix import rows
from tests.problems import raises_problem

pytestmark = pytest.mark.whole
KEY, TOKENS = "stages.x", 3


def prefixed(kind: str) -> Any:
    """A classifier of two layers whose prefix moves the logits; Llama has two key heads of four."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    sizes |= {"n_inner": 24} if kind == "gpt2" else {"num_key_value_heads": 2} if kind == "llama" else {}
    config = with_class(transformers.AutoConfig.for_model(kind, vocab_size=20, pad_token_id=0, **sizes), "text-classification")
    changed = with_prefix(config, PrefixTuning(tokens=TOKENS), KEY)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = with_linears(auto_class("text-classification", changed).from_config(changed)).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**rows()).logits
        return found


def learned(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if ".prefix." in name}


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_heads_take_their_part_with_them(kind: str) -> None:
    model = prefixed(kind)
    structure = Structure.of(model, KEY)
    assert structure.sizes.prefix == TOKENS
    of_group = structure.attentions[0].group
    every = KeptUnits.everything(structure.sizes)
    kept = dataclasses.replace(every, heads=([0], list(every.heads[1])[-1:]))
    small: Any = shrink(model, structure, kept, KEY)
    for block, attention in enumerate(structure.attentions):  # written out: the output layer does not read the other heads
        weight = model.get_submodule(attention.output).weight.data
        gone = [head for head in range(attention.heads) if head // of_group not in kept.heads[block]]
        for head in gone:
            weight[:, head * attention.head_dim : (head + 1) * attention.head_dim] = 0
    torch.testing.assert_close(logits(small), logits(model), rtol=1e-4, atol=1e-5)
    assert {tuple(value.shape) for value in learned(small).values()} == {(TOKENS, 4)}
    assert Structure.of(small, KEY).sizes.same(kept.sizes(structure.sizes))


@pytest.mark.parametrize("task", ["token-classification", "question-answering", "sentence-embedding"])
def test_models_of_other_answers_learn_and_keep_one(task: Task, tmp_path: Path) -> None:
    """The last one has no head: only the prefix is trained."""
    words = len(sentiment.SPECIALS + sentiment.WORDS)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=words, **sizes)
    set_labels(config, task, ("a", "b"))
    if task == "sentence-embedding":
        setattr(config, EMBEDDING_KEY, {"pooling": "mean", "dimensions": 16, "normalize": True})
    model: Any = auto_class(task, config).from_config(with_class(config, task)).eval()
    before = logits(model)
    with tuning(model, PrefixTuning(tokens=TOKENS), 0, KEY) as trained:
        for name in learned(model):
            model.get_parameter(name).data.normal_(generator=torch.Generator().manual_seed(0))
        model(**rows()).logits.square().mul(torch.arange(before.shape[-1])).sum().backward()
        assert all(model.get_parameter(name).grad.abs().max() > 0 for name in learned(model))
        head = sum(weight.numel() for name, weight in model.named_parameters() if weight.requires_grad and ".prefix." not in name)
        assert trained == head + 2 * 2 * TOKENS * 16
        assert (head == 0) == (task == "sentence-embedding")
    assert (logits(model) - before).abs().max() > 1e-3
    save(model, sentiment.checkpoint(), tmp_path, "Tuned")
    torch.testing.assert_close(logits(load(tmp_path)), logits(model))


def test_layers_leave_with_their_prefix() -> None:
    model = prefixed("bert")
    structure = Structure.of(model, KEY)
    small = shrink(model, structure, dataclasses.replace(KeptUnits.everything(structure.sizes), layers=[1]), KEY)
    assert prefix_of(small.config) == TOKENS
    for name, value in learned(small).items():
        assert torch.equal(value, model.get_parameter(name.replace("layer.0.", "layer.1.")))


def test_values_turn_with_those_of_tokens() -> None:
    model = prefixed("llama")
    expected, before = logits(model), {name: value.clone() for name, value in learned(model).items()}
    figures = rotate(model, rows(), 0, KEY)
    assert figures["values"]
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    for name, value in learned(model).items():
        assert torch.equal(value, before[name]) != name.endswith("value")


def test_no_factor_moves_into_the_layer_of_values() -> None:
    model = prefixed("bert")
    plain: Any = auto_class("text-classification").from_config(transformers.BertConfig(**sizes_of(model))).eval()
    folds = {fold.producer: fold.blocked for fold in find_folds(model, rows(), lambda model, given: model(**given))}
    without = {fold.producer: fold.blocked for fold in find_folds(plain, rows(), lambda model, given: model(**given))}
    values = [name for name in without if name.endswith("self.value")]
    assert [without[name] for name in values] == [None, None]
    assert folds.keys().isdisjoint(values)  # it is joined to the prefix before anything reads it
    assert folds  # other layers are followed as before


def sizes_of(model: Any) -> dict[str, Any]:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return {name: getattr(model.config, name) for name in names}


def test_whole_heads_become_zeros_as_without_it() -> None:
    model = prefixed("bert")
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = {(bundle.block, bundle.what): bundle.members for bundle in bundles(model, Structure.of(model, KEY), layers, 1)}
    for block in range(2):
        assert sorted(name.rpartition(".")[2] for name, _, _ in found[block, "heads"]) == ["dense", "key", "query", "value"]


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_int8_products_read_it(kind: str, checkpoint: Any, make_context: Callable[..., Context], tmp_path: Path) -> None:  # noqa: F811
    folder, context = tuned(checkpoint(kind), make_context, tmp_path)
    (tmp_path / "int8").mkdir()
    Quantize(attention=True, equalization=True, smoothquant=False).run(Artifact(folder, {}), context, tmp_path / "int8")
    model, before = load(tmp_path / "int8"), load(folder)
    assert learned(model).keys() == learned(before).keys()
    assert all(torch.equal(value, learned(before)[name]) for name, value in learned(model).items())
    close = (logits(model) - logits(before)).abs().max()
    for name in learned(model):
        model.get_parameter(name).data.zero_()
    assert close < 0.5 * (logits(model) - logits(before)).abs().max()


def tuned(folder: Path, make_context: Callable[..., Context], tmp_path: Path) -> tuple[Path, Context]:  # noqa: F811
    """A checkpoint with a drawn prefix, and a context for it."""
    context = make_context(folder)
    model: Any = load(folder)
    config = with_prefix(model.config, PrefixTuning(tokens=TOKENS), KEY)
    made = with_linears(auto_class("text-classification", config).from_config(config))
    generator = torch.Generator().manual_seed(0)
    own = {name: torch.randn(value.shape, generator=generator) for name, value in learned(made).items()}
    made.load_state_dict({**model.state_dict(), **own})
    out = tmp_path / "prefixed"
    out.mkdir()
    save(made, folder, out, "Drawn")
    return out, context


def test_what_does_not_read_it_says_so(checkpoint: Any, make_context: Callable[..., Context], tmp_path: Path) -> None:  # noqa: F811
    folder, _ = tuned(checkpoint("bert"), make_context, tmp_path)
    model, scales = load(folder), {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and ".encoder." in name:
            scale_O = weight_scale(layer.weight.data, levels(8))
            layer.weight.data = on_grid(layer.weight.data, scale_O, levels(8))
            scales[name] = LayerScales(scale_O, torch.tensor(0.03), 8)
    (tmp_path / "int8").mkdir()
    save(model, folder, tmp_path / "int8", "Quantized")
    save_quantization(tmp_path / "int8", scales, {"classifier": "head"})
    with pytest.raises(InputError, match="its attention reads a learned prefix too"):
        plan_of(Checkpoint(tmp_path / "int8"))
    assert "read a learned prefix" in str(obstacle(Checkpoint(tmp_path / "int8")))


def recipe(folder: Path, path: Path, *stages: dict[str, Any], engines: tuple[str, ...] = ("openvino", "onnxruntime")) -> Any:
    folder.mkdir()
    for seed, (split, count) in enumerate({"train": 96, "test": 40}.items()):
        random = np.random.default_rng(seed)
        texts = [" ".join(random.choice(sentiment.WORDS, random.integers(1, 12))) for _ in range(count)]
        lines = [json.dumps({"text": text, "label": int("film" in text.split())}) + "\n" for text in texts]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return check(
        {
            "name": "tiny",
            "model": {"path": str(path), "task": "text-classification", "head": "new"},
            "data": {"path": str(folder), "max_length": sentiment.LENGTH},
            "target": {"engines": [*engines], "batch_sizes": [1, 4], "sequence_lengths": [8], "threads": 1},
            "stages": [{"finetune": {"prefix": {"tokens": 4, "encoder": "mlp"}, "epochs": 3, "learning_rate": 0.02}}, *stages],
            "seed": 1,
        }
    )


def test_an_engine_that_does_not_read_it_is_refused_before_the_first_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.engines.torch_kernels.absence", lambda device: None)
    given = recipe(tmp_path / "data", sentiment.checkpoint(), {"quantize": {}}, {"export": {}}, engines=("torch_kernels",))
    with raises_problem("target.engines", "torch_kernels", "learned prefix", "leave torch_kernels out"):
        plan(given, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("engines_inside", "no_clocks")
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_run_goes_through_every_stage(kind: str, checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("export.engines.openvino.computes_bf16", lambda: False)
    path = sentiment.checkpoint() if kind == "bert" else checkpoint(kind)
    prune = {"prune": {"granularity": ["heads"], "sparsity": 0.2, "rows": 16, "recover": {"epochs": 0.5}}}
    quantize = {"quantize": {"calibration": {"rows": 48}, "attention": True}}
    stages = [*([prune] if kind == "bert" else []), quantize, {"export": {}}, *([{"triton_repo": {}}] if kind == "bert" else [])]
    report = run(recipe(tmp_path / "data", path, *stages), tmp_path / "run", progress=ConsoleProgress("silent")).report
    last = next(variant for variant in report["variants"] if variant["id"] == "quantize")
    assert last["precision"] == "int8"
    assert set(last["accuracy"]) >= {"torch", "openvino", "onnxruntime"}
    for made in (tmp_path / "run" / "stages").glob("*"):
        if (made / "config.json").is_file() and not made.name.startswith("model-"):
            assert prefix_of(Checkpoint(made).config) == 4, made.name
    if kind == "bert":
        told_by = json.loads(next((tmp_path / "run").glob("stages/triton_repo-*/triton.json")).read_text())
        assert [model["disagreements"] for model in told_by["models"]] == [0] * len(told_by["models"])
