"""Plain text: how it is read, what is left out, how a corpus is packed; and the stage that learns from it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import InputError
from compress.model import load
from compress.splits import content_key
from compress.stage import Context
from compress.train import Batch
from distill.distill import Distill
from distill.plain_text import PlainText, new_rows, packed, read_plain
from tests.distill.conftest import WORDS, write_tokenizer

Contexts = Callable[..., Context]


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    texts = ["a good film", "dull", 'with "quotes", and a comma']
    (tmp_path / "a.txt").write_text("a good film\n\n  dull \n" + texts[2] + "\n")
    (tmp_path / "b.tsv").write_text("id\tsentence\n" + "".join(f"{i}\t{text}\n" for i, text in enumerate(texts)))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))
    for name, column in (("a.txt", "text"), ("b.tsv", "sentence"), ("c.jsonl.gz", "text")):
        assert read_plain(PlainText(path=str(tmp_path / name), text=column), "k") == texts
    (tmp_path / "b.tsv").unlink()
    assert read_plain(PlainText(path=str(tmp_path)), "k") == texts * 2
    (tmp_path / "pairs.csv").write_text("q1,q2\na,b\nc,d\n")
    assert read_plain(PlainText(path=str(tmp_path / "pairs.csv"), text="q1", text_pair="q2"), "k") == [("a", "b"), ("c", "d")]


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("nowhere.txt", None, r"k.path: .*nowhere.txt given; a file .* a folder of them or a Hub id is allowed"),
        ("a.txt", "\n \n", r"k.path: .*a.txt: holds no text; at least one row is needed"),
        ("a.jsonl", '{"text": 3}\n', r"a.jsonl line 1: 3 given as text"),
        ("a.csv", "other\nx\n", r"a.csv.*text"),
        ("empty", "", r"k.path: .*empty given; a file"),
    ],
)
def test_what_is_no_text_says_so(name: str, contents: str | None, message: str, tmp_path: Path) -> None:
    if name == "empty":
        (tmp_path / name).mkdir()
    elif contents is not None:
        (tmp_path / name).write_text(contents)
    with pytest.raises(InputError, match=message):
        read_plain(PlainText(path=str(tmp_path / name)), "k")


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n")
    assert read_plain(PlainText(path=str(file)), "k") == ["one"]
    file.write_text("one\ntwo\n")
    assert read_plain(PlainText(path=str(file)), "k") == ["one", "two"]


@given(st.lists(st.sampled_from("abcdefgh")), st.sets(st.sampled_from("abcdefgh")), st.sets(st.sampled_from("abcdefgh")))
def test_rows_that_are_held_out_or_known_are_left_out(rows: list[str], held_out: set[str], known: set[str]) -> None:
    kept, dropped, there = new_rows(rows, map(content_key, held_out), map(content_key, known))
    assert kept == [row for i, row in enumerate(rows) if row not in held_out | known and row not in rows[:i]]
    assert dropped == sum(row in held_out for row in rows)
    assert len(kept) + dropped + there == len(rows)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from compress.model_config import load_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, [*WORDS, "un", "##like", "##ly", "##d"])
    return load_tokenizer(str(folder))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.sampled_from([*WORDS, "unlikely", "unliked"]), min_size=1, max_size=30), max_size=12), st.integers(5, 20))
def test_packing_keeps_every_word_and_the_limit(tokenizer: Any, lines: list[list[str]], max_length: int) -> None:
    pieces = packed([" ".join(line) for line in lines], tokenizer, max_length)
    assert [word for piece in pieces for word in piece.split()] == [word for line in lines for word in line]
    lengths = [len(tokenizer(piece)["input_ids"]) for piece in pieces]
    assert all(length <= max_length for length in lengths)
    for one, other in pairwise(lengths):  # no two neighbours would have fitted into one, but for a part of a word
        assert one + other - 2 + 1 + 3 > max_length - 2


def test_a_word_longer_than_a_row_is_cut(tokenizer: Any) -> None:
    assert packed(["unlikely"], tokenizer, 4) == ["unlike", "ly"]
    assert packed([], tokenizer, 8) == []


def small(**changes: Any) -> Distill:
    return Distill(**{"student": {"layers": 2}, "epochs": 1, "batch_size": 16, "learning_rate": 1e-3, **changes})


@pytest.fixture
def extra(make_context: Contexts, tmp_path: Path) -> Path:
    """30 new texts, one of them twice, 3 evaluation, 2 selection and 4 train rows."""
    data, random = make_context().data, np.random.default_rng(5)
    new = [" ".join(["like", *random.choice(WORDS, 12)]) for _ in range(30)]
    known = [*data.evaluation.rows[:3], *data.selection.rows[:2], *data.train.rows[:4]]
    file = tmp_path / "extra.txt"
    file.write_text("\n".join([*new, new[0], *map(str, known)]) + "\n")
    return file


def test_extra_text_is_learned_from_without_labels(make_context: Contexts, extra: Path, told: Any, tmp_path: Path) -> None:
    context = make_context()
    (tmp_path / "out").mkdir()
    figures = small(extra_text={"path": str(extra)}).run(context.baseline, context, tmp_path / "out")
    assert (figures["rows"], figures["labelled_rows"], figures["teacher_logits"]) == (78, 48, "cached")
    assert "extra_text: 30 rows; left out: 5 of evaluation or selection, 5 there already" in "".join(told.lines)
    assert set(figures["losses"][0]) == {"epoch", "soft_target", "hard_target", "loss"}


def test_rows_without_a_label_have_no_hard_loss(make_context: Contexts, extra: Path, tmp_path: Path) -> None:
    context = make_context()

    def objective(stage: Distill) -> Any:
        from compress.data import preprocessor
        from distill.steps import Steps
        from distill.teacher import freeze

        folder = context.baseline.path
        student, teacher = load(folder), freeze(load(folder))
        prepared = preprocessor(folder, context.task, 16, context.target)
        steps = Steps(stage, folder, context)
        split, labelled = steps.rows()
        return steps.objective(student, [teacher], prepared, [prepared], split, labelled), split, labelled

    built, split, labelled = objective(small(extra_text={"path": str(extra)}, augment={"mask": 0.3, "copies": 2}))
    assert (labelled, len(split)) == (48, 3 * 78)
    assert built.pair.teacher.logits is None  # copies are asked anew
    indices = np.array([0, 47, 48, 77, 78, 100, 233])
    features = built.pair.rows.batch(indices)
    batch = Batch(features, torch.from_numpy(split.labels[indices]), indices, 3, 9)
    parts = built(built.pair.student.model, batch)
    assert (parts["hard_target"][:2] > 0).all()
    assert (parts["hard_target"][2:] == 0).all()
    torch.testing.assert_close(parts["soft_target"], torch.zeros(7), atol=1e-6, rtol=0)  # student and teacher see the same masks
    assert set(split.rows[48:78]).isdisjoint(context.data.evaluation.rows)
    mixed, split, labelled = objective(small(extra_text={"path": str(extra)}, loss="mixkd"))
    mixing = mixed(mixed.pair.student.model, Batch(features, torch.from_numpy(split.labels[indices % 78]), indices % 78, 3, 9))
    assert (mixing["mixed_labels"][2:4] == 0).all()
    assert (mixing["mixed_answers"] >= 0).all()


def test_augmented_training_is_the_same_again(make_context: Contexts, tmp_path: Path) -> None:
    losses = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        context = make_context()
        figures = small(augment={}, epochs=0.5).run(context.baseline, context, tmp_path / name)
        losses.append(figures["losses"])
        assert (figures["rows"], figures["teacher_logits"]) == (96, "live")
    assert losses[0] == losses[1]


@pytest.mark.parametrize("pack", [True, False])
def test_a_corpus_teaches_the_inside_and_leaves_the_head(pack: bool, make_context: Contexts, extra: Path, tmp_path: Path) -> None:
    context = make_context()
    (tmp_path / "out").mkdir()
    stage = small(corpus={"path": str(extra)}, loss="minilmv2", pack=pack, epochs=4, learning_rate=5e-3)
    figures = stage.run(context.baseline, context, tmp_path / "out")
    first, last = figures["losses"][0], figures["losses"][-1]
    assert set(first) == {"epoch", "query_relation", "key_relation", "value_relation", "loss"}
    assert last["loss"] < 0.9 * first["loss"]
    assert figures["selection"]["values"] == []
    assert (figures["labelled_rows"], figures["rows"]) == (0, figures["rows"] if pack else 34)  # train rows are no labels here
    before, after = load(context.baseline.path), load(tmp_path / "out")
    assert torch.equal(before.classifier.weight, after.classifier.weight)  # type: ignore[union-attr,arg-type]


def test_phases_of_a_preset_become_one_on_a_corpus(extra: Path) -> None:
    preset = small(corpus={"path": str(extra)}, loss="tinybert").resolved()
    assert [(loss.name, loss.steps) for loss in preset.losses] == [("tinybert", (0.0, 1.0))]
    assert preset.hard_weight == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": {"path": "FILE"}}, r"stages.distill.corpus: given, and soft_target compares answers; .* give loss: minilmv2"),
        ({"corpus": {"path": "FILE"}, "loss": "mixkd"}, r"corpus: given, and mixkd compares answers"),
        ({"corpus": {"path": "FILE"}, "losses": [{"name": "minilm"}, {"name": "soft_target"}]}, r"corpus: given, and soft_target compares"),
        ({"corpus": {"path": "FILE", "text_pair": "b"}, "loss": "minilm"}, r"corpus.text_pair: 'b' given; a corpus is running text"),
        (
            {"extra_text": {"path": "FILE", "text_pair": "b"}},
            r"extra_text: the rows of the data are single texts: leave out stages.distill",
        ),
    ],
)
def test_text_that_does_not_go_with_the_rest_is_refused(
    changes: Any, message: str, extra: Path, make_context: Contexts, checkpoint: Any
) -> None:
    config = load(checkpoint("bert", num_labels=2)).config
    stage = Distill(**json.loads(json.dumps(changes).replace("FILE", str(extra))))
    with pytest.raises(InputError, match=message):
        stage.check(config, config, make_context())


def test_the_key_of_a_stage_knows_the_text(extra: Path, make_context: Contexts) -> None:
    context = make_context()
    stage = small(extra_text={"path": str(extra)})
    before = stage.depends(context)
    assert stage.work(10, context.data) == 10 * (3 * 88 + 20 + 88)  # as it is read, 40 rows
    extra.write_text(extra.read_text() + "more\n")
    assert stage.depends(context) != before
    assert small().depends(context) is None


def test_any_model_of_the_kind_teaches_on_a_corpus(extra: Path, make_context: Contexts, make_model: Any, tmp_path: Path) -> None:
    """A backbone without a head for the task, as pretraining leaves it."""
    import dataclasses

    from compress.artifact import Artifact

    folder = tmp_path / "general"
    make_model("bert", num_labels=2).bert.save_pretrained(folder)
    write_tokenizer(folder, WORDS)
    context = dataclasses.replace(make_context(), teachers=(Artifact(folder, {"id": "general", "digest": "2" * 64}),))
    (tmp_path / "out").mkdir()
    figures = small(corpus={"path": str(extra)}, loss="minilm", teacher=str(folder)).run(context.baseline, context, tmp_path / "out")
    assert figures["teacher"] == "general"
