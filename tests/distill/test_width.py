from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distill.choices import Student
from distill.student import build, student_config
from distill.width import narrow, top, with_widths
from foundation.core.errors import InputError
from foundation.models.architecture.attention import find_attentions
from foundation.models.architecture.axes import axes_of
from foundation.models.folder import Checkpoint
from foundation.models.size import count
from foundation.stage.context import Context

KINDS = ("bert", "roberta", "distilbert", "gpt2", "vit")
KEY = "stages.distill.student"
FFN = {  # (up, down) of block 2, down as [out, in]
    "bert": ("bert.encoder.layer.2.intermediate.dense", "bert.encoder.layer.2.output.dense"),
    "distilbert": ("distilbert.transformer.layer.2.ffn.lin1", "distilbert.transformer.layer.2.ffn.lin2"),
    "gpt2": ("transformer.h.2.mlp.c_fc", "transformer.h.2.mlp.c_proj"),
    "vit": ("vit.layers.2.mlp.fc1", "vit.layers.2.mlp.fc2"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_width_is_the_model_itself(kind: str, make_model: Any, make_features: Any) -> None:
    model, features = make_model(kind), make_features(kind)
    expected = model(**features).logits
    same = narrow(model, with_widths(model.config, 16, 24, 4, KEY), KEY)
    for name, value in model.state_dict().items():
        assert torch.equal(value, same.state_dict()[name]), name
    assert torch.equal(same(**features).logits, expected)
    assert same.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", sorted(FFN))
def test_a_student_of_fewer_neurons_is_the_model_with_the_others_silent(kind: str, make_model: Any, make_features: Any) -> None:
    model, features = make_model(kind), make_features(kind)
    student = narrow(model, with_widths(model.config, None, 10, None, KEY), KEY)
    for block in range(4):
        up, down = (model.get_submodule(name.replace(".2.", f".{block}.")) for name in FFN[kind])
        first, second = up.weight.data, down.weight.data  # [F, D], [D, F]
        lengths = [float(first[n].norm()) * float(second[:, n].norm()) for n in range(24)]
        silent = sorted(range(24), key=lambda n: lengths[n])[:14]
        second[:, silent] = 0
    torch.testing.assert_close(student(**features).logits, model(**features).logits, atol=1e-4, rtol=1e-4)
    assert tuple(student.get_submodule(FFN[kind][0]).weight.shape) == (10, 16)  # type: ignore[union-attr]


def naive_channels(model: Any, count: int) -> list[int]:
    """Written out for BERT: the share of each channel in every weight that has it."""
    scores = [0.0] * 16

    def add(values: Tensor, axis: int) -> None:
        for channel in range(16):
            scores[channel] += float(values.select(axis, channel).square().sum() / values.square().sum())

    for name, value in model.state_dict().items():
        if "query" in name or "key" in name or "value" in name:
            if value.ndim == 2:
                add(value, 1)
        elif "attention.output.dense.weight" in name or "output.dense.weight" in name:
            add(value, 0)
        elif "intermediate.dense.weight" in name or "classifier.weight" in name:
            add(value, 1)
        elif "pooler.dense.weight" in name:
            add(value, 0)
            add(value, 1)
        elif "embeddings.weight" in name:
            add(value, 1)
        elif "intermediate" not in name and "classifier" not in name:
            add(value, 0)  # LayerNorms and biases
    return sorted(sorted(range(16), key=lambda channel: -scores[channel])[:count])


@pytest.mark.parametrize(("hidden", "heads"), [(8, 4), (8, 2), (12, 3)])
def test_channels_heads_and_their_numbers_are_the_most_important(hidden: int, heads: int, make_model: Any) -> None:
    model = make_model("bert")
    channels = naive_channels(model, hidden)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    student = narrow(model, with_widths(model.config, hidden, None, heads, KEY), KEY).state_dict()
    assert torch.equal(student["bert.embeddings.word_embeddings.weight"], before["bert.embeddings.word_embeddings.weight"][:, channels])
    assert torch.equal(student["bert.pooler.dense.weight"], before["bert.pooler.dense.weight"][channels][:, channels])
    width = hidden // heads
    for block in range(4):
        start = f"bert.encoder.layer.{block}.attention."
        q, k, v = (before[f"{start}self.{what}.weight"] for what in ("query", "key", "value"))
        o = before[f"{start}output.dense.weight"]
        qk = [float(q[i].norm()) * float(k[i].norm()) for i in range(16)]
        vo = [float(v[i].norm()) * float(o[:, i].norm()) for i in range(16)]
        of_heads = [sum(qk[4 * h : 4 * h + 4]) / sum(qk) + sum(vo[4 * h : 4 * h + 4]) / sum(vo) for h in range(4)]
        kept = sorted(sorted(range(4), key=lambda h: -of_heads[h])[:heads])
        for scores, names in ((qk, ("query", "key")), (vo, ("value",))):
            numbers = [i for h in kept for i in sorted(sorted(range(4 * h, 4 * h + 4), key=lambda i: -scores[i])[:width])]
            for name in names:
                factor = (width / 4) ** 0.5 if name == "query" else 1.0
                full = before[f"{start}self.{name}.weight"]
                torch.testing.assert_close(student[f"{start}self.{name}.weight"], factor * full[numbers][:, channels])
                torch.testing.assert_close(student[f"{start}self.{name}.bias"], factor * before[f"{start}self.{name}.bias"][numbers])
        assert torch.equal(student[f"{start}output.dense.weight"], o[channels][:, numbers])


def test_fused_layers_are_sliced_part_by_part(make_model: Any) -> None:
    """The queries, keys and values of GPT-2 come out of one layer, those of BERT out of three: the same weights give the same slices."""
    model = make_model("gpt2")
    weight = model.transformer.h[1].attn.c_attn.weight.data.T.clone()  # [D, 3 D]
    student: Any = narrow(model, with_widths(model.config, 8, None, 2, KEY), KEY)
    fused = student.transformer.h[1].attn.c_attn.weight.data.T
    channels = [
        c for c in range(16) if any(torch.equal(student.transformer.wte.weight[:, i], model.transformer.wte.weight[:, c]) for i in range(8))
    ]
    assert len(channels) == 8
    for part in range(3):
        columns = weight[channels][:, 16 * part : 16 * part + 16]
        for i in range(8):
            assert (fused[:, 8 * part + i, None] == columns).all(0).any(), (part, i)


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_students_of_every_kind_answer(kind: str, make_model: Any, make_features: Any) -> None:
    model = make_model(kind)
    config = with_widths(model.config, 8, 7, 2, KEY)
    student = narrow(model, config, KEY)
    assert student(**make_features(kind)).logits.isfinite().all()
    task: Any = "image-classification" if kind == "vit" else "text-classification"
    if kind == "gpt2":  # its head looks for the last token, which a model without weights does not have
        return
    assert count(config, task, 8).parameters == sum(parameter.numel() for parameter in student.parameters())


def test_axes_of_equal_size_are_not_mixed_up(make_model: Any) -> None:
    """A vocabulary, positions and an FFN of as many entries as there are channels: sizes alone would not tell them apart."""
    model = make_model("bert", intermediate_size=16, max_position_embeddings=16, vocab_size=16)
    axes = axes_of(model, KEY)
    hidden, ffn = axes.hidden, axes.ffn
    assert ("bert.embeddings.word_embeddings.weight", 0) not in hidden
    assert ("bert.embeddings.word_embeddings.weight", 1) in hidden
    assert ("bert.encoder.layer.0.intermediate.dense.weight", 0) in ffn - hidden
    assert ("bert.encoder.layer.0.intermediate.dense.weight", 1) in hidden - ffn
    student = narrow(model, with_widths(model.config, 8, None, None, KEY), KEY)
    assert tuple(student.bert.encoder.layer[0].intermediate.dense.weight.shape) == (16, 8)  # type: ignore[union-attr,index,operator]


def test_attention_is_found_by_what_goes_through_it(make_model: Any) -> None:
    found = find_attentions(make_model("gpt2"), KEY).own
    assert found[3].parts == {what: ("transformer.h.3.attn.c_attn", part) for part, what in enumerate(("query", "key", "value"))}
    assert found[3].output == "transformer.h.3.attn.c_proj"
    found = find_attentions(make_model("vit"), KEY).own
    assert found[0].parts["key"] == ("vit.layers.0.attention.k_proj", 0)
    assert found[0].output == "vit.layers.0.attention.o_proj"


def test_turned_queries_are_refused() -> None:
    from transformers import ModernBertConfig, ModernBertForSequenceClassification

    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    model = ModernBertForSequenceClassification(ModernBertConfig(**sizes, **tokens)).eval()
    with pytest.raises(InputError, match="heads of this modernbert cannot be sliced: Q or K"):
        narrow(model, with_widths(model.config, 8, None, 2, KEY), KEY)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9), st.integers(1, 9))
def test_the_top_is_in_order_and_the_largest(values: list[int], number: int) -> None:
    number = min(number, len(values))
    kept = top(torch.tensor(values), number).tolist()
    assert kept == sorted(set(kept))
    assert sorted((values[i] for i in kept), reverse=True) == sorted(values, reverse=True)[:number]


@pytest.mark.parametrize(
    ("student", "message"),
    [
        (Student(hidden=17), "student.hidden: 17 given; the incoming model has 16"),
        (Student(ffn=25), "student.ffn: 25 given; the incoming model has 24"),
        (Student(heads=5), "student.heads: 5 given; the incoming model has 4"),
        (Student(hidden=10), "student.hidden: 10 channels cannot be divided into 4 heads"),
        (Student(heads=2), r"student.heads: 2 given; with 16 channels a head has 8 dimensions, more than in the incoming model \(4\)"),
    ],
)
def test_widths_that_cannot_be(student: Student, message: str, make_model: Any) -> None:
    with pytest.raises(InputError, match=message):
        student_config(student, make_model("bert").config, KEY)


def test_depth_and_width_go_together(checkpoint: Callable[..., Path], make_context: Callable[..., Context]) -> None:
    context, folder = make_context(), checkpoint("bert", num_labels=2)
    student = Student(layers=2, hidden=8, ffn=12, heads=2)
    model: Any
    model, _ = build(student, folder, context, KEY)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.num_attention_heads) == (2, 8, 12, 2)
    assert config.id2label == {0: "negative", 1: "positive"}
    planned = student_config(student, Checkpoint(folder).config, KEY)
    assert count(planned, context.task, 8) == count(model, context.task, 8)
