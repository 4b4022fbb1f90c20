from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from distill.choices import Student, chosen_layers
from distill.student import build, student_config, take_layers
from foundation.core.errors import InputError
from foundation.models.checkpoint import load
from foundation.models.size import count
from foundation.stage.context import Context
from tests.problems import raises_problem

KINDS = ("bert", "roberta", "distilbert", "gpt2", "vit")
TASK = {kind: "image-classification" if kind == "vit" else "text-classification" for kind in KINDS}
KEY = "stages.distill.student"


def logits(model: nn.Module, features: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**features).logits
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_of_all_layers_is_the_teacher(kind: str, make_model: Any, make_features: Any) -> None:
    teacher, features = make_model(kind), make_features(kind)
    student = take_layers(teacher, range(4), KEY, seed=3)
    assert torch.equal(logits(student, features), logits(teacher, features))
    for name, value in teacher.state_dict().items():
        assert torch.equal(value, student.state_dict()[name]), name
    assert student.config.to_dict() == teacher.config.to_dict()  # type: ignore[operator,union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_copied_in_their_order_and_the_rest_as_it_is(kind: str, make_model: Any, make_features: Any) -> None:
    teacher = make_model(kind)
    student = take_layers(teacher, [0, 3, 3], KEY)
    blocks, name = {"bert": "bert.encoder.layer", "roberta": "roberta.encoder.layer", "vit": "vit.layers"}, ""
    name = {**blocks, "distilbert": "distilbert.transformer.layer", "gpt2": "transformer.h"}[kind]
    expected = {key: value for key, value in teacher.state_dict().items() if not key.startswith(f"{name}.")}
    for target, source in enumerate([0, 3, 3]):
        start = f"{name}.{source}."
        expected |= {key.replace(start, f"{name}.{target}."): value for key, value in teacher.state_dict().items() if key.startswith(start)}
    assert expected.keys() == student.state_dict().keys()
    for key, value in expected.items():
        assert torch.equal(value, student.state_dict()[key]), key
    assert student.config.num_hidden_layers == 3  # type: ignore[union-attr]
    assert logits(student, make_features(kind)).isfinite().all()


def test_the_student_shares_no_memory_with_the_teacher(make_model: Any) -> None:
    teacher = make_model("bert")
    student = take_layers(teacher, [0, 1], KEY)
    addresses = {parameter.data_ptr() for parameter in teacher.parameters()}
    assert not any(parameter.data_ptr() in addresses for parameter in student.parameters())


def test_new_blocks_are_drawn_from_the_seed(make_model: Any) -> None:
    teacher = make_model("bert")
    one, same, other = (take_layers(teacher, [0, 1], KEY, seed, new=frozenset({0})).state_dict() for seed in (1, 1, 2))
    for name, value in one.items():
        assert torch.equal(value, same[name]), name
        if not name.startswith("bert.encoder.layer."):
            assert torch.equal(value, teacher.state_dict()[name]), name
        elif name.endswith("query.weight"):
            assert not torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("init", "num_layers", "depth", "expected"),
    [
        ("uniform", 6, 12, [0, 2, 4, 7, 9, 11]),  # DistilBERT
        ("uniform", 3, 6, [0, 3, 5]),
        ("uniform", 2, 6, [0, 5]),
        ("uniform", 1, 6, [0]),
        ("every_second", 3, 6, [0, 2, 4]),
        ("every_second", 2, 3, [0, 2]),
        ("first", 3, 6, [0, 1, 2]),
        ("last", 3, 6, [3, 4, 5]),
        ("random", 2, 6, [0, 1]),
        ((6, 1), 2, 6, [5, 0]),
    ],
)
def test_the_layers_that_are_kept(init: Any, num_layers: int, depth: int, expected: list[int]) -> None:
    assert chosen_layers(init, num_layers, depth, KEY) == expected


@given(st.integers(1, 48), st.integers(1, 48), st.sampled_from(["uniform", "first", "last"]))
def test_kept_layers_ascend_and_all_of_them_are_all(num_layers: int, depth: int, init: Any) -> None:
    num_layers = min(num_layers, depth)
    layers = chosen_layers(init, num_layers, depth, KEY)
    assert len(layers) == num_layers
    assert sorted(set(layers)) == layers
    assert set(layers) <= set(range(depth))
    if num_layers == depth:
        assert layers == list(range(depth))
    if init == "uniform" and num_layers > 1:
        assert (layers[0], layers[-1]) == (0, depth - 1)
        gaps = {second - first for first, second in pairwise(layers)}
        assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("student", "message"),
    [
        (Student(layers=5), "student.layers: 5 given; the incoming model has 4 layers"),
        (Student(layers=3, init="every_second"), "every_second given; it keeps at most 2 of 4 layers, not 3: give uniform"),
        (Student(init=(1, 5)), "student.init: layer 5 given; the incoming model has layers 1 to 4"),
        (Student(config={"model_type": "brt"}), "student.config.model_type: 'brt' given.*did you mean 'bert'"),
        (Student(config={"num_layer": 2}), "student.config.num_layer: not a config key of a bert that can be set here"),
        (Student(config={"num_labels": 7}), "student.config.num_labels: not a config key"),
    ],
)
def test_what_is_no_student(student: Student, message: str, make_model: Any) -> None:
    with pytest.raises(InputError, match=message):
        student_config(student, make_model("bert").config, KEY)


def test_one_block_for_all_layers_is_refused() -> None:
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(vocab_size=20, embedding_size=8, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, intermediate_size=24)
    with pytest.raises(InputError, match="albert has 1 blocks for 4 layers; one block per layer"):
        take_layers(AlbertForSequenceClassification(config), [0, 1], KEY)


def modernbert(**changes: Any) -> nn.Module:
    from transformers import ModernBertConfig, ModernBertForSequenceClassification

    ids = {"vocab_size": 20, **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)}
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 24}
    return ModernBertForSequenceClassification(ModernBertConfig(**ids, **sizes, **changes)).eval()


def test_a_layer_that_would_lose_a_weight_is_refused() -> None:
    """The first block of a ModernBERT has no norm before its attention: the student's first one would drop that of the source."""
    model = modernbert()
    assert take_layers(model, [0, 1], KEY).config.num_hidden_layers == 2  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"layer 3 .*modernbert .* attn_norm.weight, .*layer 1"):
        take_layers(model, [2, 3], KEY)
    with pytest.raises(InputError, match=r"blocks of this modernbert .*layers.0.attn_norm.weight\)"):
        take_layers(model, [0, 0], KEY)
    take_layers(model, [2, 3], KEY, new=frozenset({0}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_that_looks_at_its_place_is_refused(kind: str, make_model: Any) -> None:
    """GPT-2 may divide the scores of layer m by m: the same weights answer otherwise in another place."""
    take_layers(make_model(kind), [2, 0, 3], KEY)
    if kind != "gpt2":
        return
    model = make_model(kind, scale_attn_by_inverse_layer_idx=True)
    take_layers(model, [0, 1], KEY)
    with pytest.raises(InputError, match=r"layer 4 of this gpt2 .* layer 2 .*with equal weights"):
        take_layers(model, [0, 3], KEY)


def test_a_model_in_training_stays_so(make_model: Any) -> None:
    model = make_model("bert").train()
    take_layers(model, [1], KEY)
    assert model.training
    assert not any(block._forward_hooks for block in model.bert.encoder.layer)


def test_a_model_that_is_no_stack_of_layers_is_refused() -> None:
    from transformers import ResNetConfig

    with raises_problem("student", "resnet", "not a stack of equal layers", "give another model"):
        student_config(Student(), ResNetConfig(), KEY)


@pytest.mark.parametrize(
    "given",
    [
        {"layers": 2, "path": "x/y"},
        {"layers": 2, "config": {}},
        {"init": [1], "path": "x"},
        {"layers": 3, "init": [1, 2]},
        {"init": []},
        {"layers": 0},
        {"init": "last", "path": "x"},
        {"init": "random", "config": {}},
        {"head": "keep"},
        {"head": "keep", "config": {}},
    ],
)
def test_contradictions_are_found_at_once(given: Any) -> None:
    with pytest.raises(ValidationError):
        Student(**given)


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta"])
def test_a_student_of_another_shape_has_new_weights(
    kind: str, checkpoint: Callable[..., Path], make_context: Callable[..., Context]
) -> None:
    context = make_context(checkpoint("bert", num_labels=2))
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    student = Student(config=sizes if kind == "bert" else {"model_type": kind, **sizes})
    model, folder = build(student, checkpoint("bert", num_labels=2), context, KEY)
    config: Any = model.config
    assert (config.model_type, config.num_hidden_layers, config.hidden_size, config.vocab_size) == (kind, 2, 8, 20)
    assert config.id2label == {0: "negative", 1: "positive"}
    assert folder == checkpoint("bert", num_labels=2)
    planned = student_config(student, load(checkpoint("bert", num_labels=2)).config, KEY)
    assert count(planned, context.task, 8) == count(model, context.task, 8)
    again, _ = build(student, checkpoint("bert", num_labels=2), context, KEY)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def changed(incoming: Any, **values: Any) -> Any:
    return student_config(Student(config=values), incoming, KEY)


def test_what_follows_from_a_changed_size_is_not_carried_over() -> None:
    import transformers

    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 20}
    types = ["full_attention", "sliding_attention"]
    llama = transformers.LlamaConfig(**sizes, pad_token_id=0)
    assert llama.head_dim == 8
    small = changed(llama, hidden_size=8, num_attention_heads=2)
    assert (small.head_dim, small.num_key_value_heads) == (4, 2)
    assert changed(llama, hidden_size=16, head_dim=2).head_dim == 2
    grouped = changed(transformers.LlamaConfig(**sizes, num_key_value_heads=2, head_dim=16), hidden_size=16, num_attention_heads=2)
    assert (grouped.head_dim, grouped.num_key_value_heads) == (16, 2)  # they did not follow from the sizes before either
    qwen = transformers.Qwen3Config(**sizes, layer_types=types[::-1] * 2, use_sliding_window=True, max_window_layers=1)
    assert (
        changed(qwen, num_hidden_layers=2).layer_types
        == transformers.Qwen3Config(**{**sizes, "num_hidden_layers": 2}, use_sliding_window=True, max_window_layers=1).layer_types
    )
    assert changed(qwen, intermediate_size=8).layer_types == types[::-1] * 2
    assert changed(qwen, num_hidden_layers=4).layer_types == types[::-1] * 2
    assert changed(qwen, num_hidden_layers=2, layer_types=types).layer_types == types


def test_a_shape_that_cannot_be_made_names_the_key(checkpoint: Callable[..., Path], make_context: Callable[..., Context]) -> None:
    with pytest.raises(InputError, match=r"student.config: no such bert can be created"):
        build(Student(config={"hidden_size": 18}), checkpoint("bert", num_labels=2), make_context(), KEY)


def test_another_checkpoint_brings_its_own_tokenizer(checkpoint: Callable[..., Path], make_context: Callable[..., Context]) -> None:
    other = checkpoint("bert", words=("great", "poor", "movie"), num_hidden_layers=1)
    student = Student(path=str(other), head="keep")
    model, folder = build(student, checkpoint("bert", num_labels=2), make_context(), KEY)
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["great"] == 5
    assert torch.equal(model.classifier.weight, load(other).classifier.weight)  # type: ignore[union-attr,arg-type]
    fresh, _ = build(Student(path=str(other)), checkpoint("bert", num_labels=2), make_context(), KEY)
    assert not torch.equal(fresh.classifier.weight, load(other).classifier.weight)  # type: ignore[union-attr,arg-type]
    assert student_config(student, load(checkpoint("bert", num_labels=2)).config, KEY).num_hidden_layers == 1


def test_a_folder_that_is_not_there_names_the_key(checkpoint: Callable[..., Path], make_context: Callable[..., Context]) -> None:
    with pytest.raises(InputError, match=r"stages.distill.student.path: there is no folder /nowhere"):
        build(Student(path="/nowhere"), checkpoint("bert", num_labels=2), make_context(), KEY)
