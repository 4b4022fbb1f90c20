"""Shapes of their own: written, read back, counted, and refused by Transformers alone with a line that says what to call."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundation.core.errors import InputError
from foundation.labels.tasks import Task
from foundation.models.architecture.shapes import auto_class, remade, with_sizes
from foundation.models.checkpoint import load, save
from foundation.models.folder import Checkpoint
from foundation.models.layers.conv1d import with_linears
from foundation.models.library import with_class
from foundation.models.own_shape import read_own
from foundation.models.size import count
from tests.foundation.sizes import sizes_of
from tests.problems import raises_problem
from tests.seldom import seldom

pytestmark = pytest.mark.whole

SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
TEXT = {"vocab_size": 20, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
CONFIGS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertConfig(**SIZES, **TEXT),
    "roberta": lambda: transformers.RobertaConfig(**SIZES, **TEXT),
    "distilbert": lambda: transformers.DistilBertConfig(vocab_size=20, n_layers=2, dim=16, n_heads=4, hidden_dim=24),
    "gpt2": lambda: transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=4, n_inner=24, n_positions=40, vocab_size=20, bos_token_id=2, eos_token_id=3
    ),
    "vit": lambda: transformers.ViTConfig(**SIZES, image_size=8, patch_size=4, num_channels=1),
    "llama": lambda: transformers.LlamaConfig(**SIZES, **TEXT, num_key_value_heads=2),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **TEXT, num_key_value_heads=2, num_local_experts=4),
}
KEY = "stages.prune"


def task_of(kind: str) -> Task:
    return "image-classification" if kind == "vit" else "text-generation" if kind in ("gpt2", "llama", "mixtral") else "text-classification"


def written(kind: str, config: Any, folder: Path) -> tuple[Any, Path]:
    """Writes a checkpoint of random weights."""
    model = with_linears(auto_class(task_of(kind), config).from_config(with_class(config, task_of(kind)))).eval()
    (folder / "source").mkdir()
    (folder / "out").mkdir()
    save(model, folder / "source", folder / "out", "drawn")
    return model, folder / "out"


def inputs_of(kind: str) -> dict[str, torch.Tensor]:
    if kind == "vit":
        return {"pixel_values": torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))}
    return {"input_ids": torch.randint(4, 20, (2, 7), generator=torch.Generator().manual_seed(0))}


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", seldom(CONFIGS, ("roberta", "distilbert")))
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_shape_is_written_read_and_counted(kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = with_class(CONFIGS[kind](), task_of(kind))
    before = sizes_of(config, KEY)
    groups = [data.draw(st.integers(1, count)) for count in before.key_value_heads]
    sizes = replace(
        before,
        hidden=data.draw(st.sampled_from([8, 12, 16])),
        heads=tuple(before.heads[0] // before.key_value_heads[0] * group for group in groups),
        key_value_heads=tuple(groups),
        ffn=before.ffn if kind == "mixtral" else tuple(data.draw(st.integers(1, 24)) for _ in groups),
        experts=tuple(data.draw(st.integers(2, 4)) for _ in groups) if kind == "mixtral" else before.experts,
        vocabulary=before.vocabulary and data.draw(st.integers(10, 20)),
    )
    model, folder = written(kind, with_sizes(config, sizes, KEY), tmp_path_factory.mktemp(kind))
    assert sizes_of(model.config, KEY).same(sizes)
    loaded = load(folder)
    assert sizes_of(loaded.config, KEY).same(sizes)  # type: ignore[union-attr]
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    features = {name: value % (sizes.vocabulary or 99) if name == "input_ids" else value for name, value in inputs_of(kind).items()}
    with torch.inference_mode():
        torch.testing.assert_close(loaded(**features).logits, model(**features).logits, atol=1e-6, rtol=1e-5)
    counted = count(Checkpoint(folder).config, task_of(kind), 8)
    assert counted.parameters == sum(parameter.numel() for parameter in loaded.parameters())


@pytest.mark.parametrize(
    ("kind", "changes", "keys"),
    [
        ("bert", {"ffn": (8, 8)}, {"intermediate_size": 8}),
        ("bert", {"hidden": 8, "heads": (2, 2), "key_value_heads": (2, 2)}, {"hidden_size": 8, "num_attention_heads": 2}),
        ("vit", {"heads": (3, 3), "key_value_heads": (3, 3)}, {"num_attention_heads": 3, "head_dim": 4}),
        ("vit", {"hidden": 12}, {"hidden_size": 12, "num_attention_heads": 4, "head_dim": 4}),
        ("llama", {"heads": (2, 2), "key_value_heads": (1, 1)}, {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}),
        ("mixtral", {"experts": (3, 3)}, {"num_local_experts": 3}),
        ("distilbert", {"vocabulary": 12}, {"vocab_size": 12}),
    ],
)
def test_what_a_stock_config_can_say_loads_with_transformers_alone(
    kind: str, changes: dict[str, Any], keys: dict[str, int], tmp_path: Path
) -> None:
    config = with_class(CONFIGS[kind](), task_of(kind))
    model, folder = written(kind, with_sizes(config, replace(sizes_of(config, KEY), **changes), KEY), tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    assert "compress_architecture" not in raw
    assert {name: getattr(model.config, name) for name in keys} == keys
    stock, info = auto_class(task_of(kind)).from_pretrained(folder, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.inference_mode():
        features = {name: value % 10 if name == "input_ids" else value for name, value in inputs_of(kind).items()}
        torch.testing.assert_close(stock.eval()(**features).logits, load(folder)(**features).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", seldom(["bert", "gpt2"], ["gpt2"]))
def test_transformers_alone_says_what_to_call(kind: str, tmp_path: Path) -> None:
    config = with_class(CONFIGS[kind](), task_of(kind))
    sizes = replace(sizes_of(config, KEY), heads=(1, 4), key_value_heads=(1, 4))
    _, folder = written(kind, with_sizes(config, sizes, KEY), tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["compress_architecture"] == {
        "model_type": kind, "head_dim": 4, "heads": [1, 4], "key_value_heads": [1, 4], "scaling": [0.5, 0.5], "ffn": [24, 24]
    }  # fmt: skip
    for auto in (transformers.AutoModel, transformers.AutoConfig):
        with pytest.raises(
            ValueError, match=rf"model type `{kind}, in a shape of its own: load it with compress.api.load_checkpoint\(folder\)`"
        ):
            auto.from_pretrained(folder)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        getattr(transformers, type(load(folder)).__name__).from_pretrained(folder)


def test_a_shape_of_its_own_becomes_a_stock_one_again(tmp_path: Path) -> None:
    config = with_class(CONFIGS["bert"](), "text-classification")
    whole = sizes_of(config, KEY)
    own = with_sizes(config, replace(whole, ffn=(3, 5)), KEY)
    assert with_sizes(own, whole, KEY).to_dict() == config.to_dict()
    model = auto_class("text-classification", own).from_config(own)
    assert type(remade(model, config)) is transformers.BertForSequenceClassification
    assert remade(remade(model, config), own).bert.encoder.layer[1].output.dense.in_features == 5  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": [1]}, "lists of 2 entries, one per layer, are needed"),
        ({"heads": [0, 1]}, "heads.0: Input should be greater than 0"),
        ({"head_dim": "wide"}, "head_dim: Input should be a valid integer"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"ffn": None}, "ffn: Input should be a valid tuple"),
    ],
)
def test_a_damaged_shape_is_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = with_class(CONFIGS["bert"](), "text-classification")
    _, folder = written("bert", with_sizes(config, replace(sizes_of(config, KEY), ffn=(3, 5)), KEY), tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    raw["compress_architecture"] |= changes
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=message) as caught:
        load(folder)
    assert len(caught.value.lines) == 1
    with pytest.raises(InputError, match=r"compress_architecture in config\.json is damaged"):
        read_own(raw["compress_architecture"], 2, "checkpoint")


def test_a_folder_whose_weights_are_of_another_shape_is_refused(tmp_path: Path) -> None:
    config = with_class(CONFIGS["bert"](), "text-classification")
    _, folder = written("bert", with_sizes(config, replace(sizes_of(config, KEY), ffn=(3, 5)), KEY), tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    raw["compress_architecture"]["ffn"] = [3, 6]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="lacks weights"):
        load(folder)


def test_no_such_shape_is_said() -> None:
    config = with_class(CONFIGS["bert"](), "text-classification")
    sizes = sizes_of(config, KEY)
    config.pad_token_id = 19
    with raises_problem("stages.prune", "bert", "Padding_idx must be within"):
        with_sizes(config, replace(sizes, vocabulary=5), KEY)
