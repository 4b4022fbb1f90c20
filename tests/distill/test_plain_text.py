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
from hypothesis import given
from hypothesis import strategies as st

from distill.distill import Distill
from distill.plain_text import PlainText, new_rows, packed, read_plain
from foundation.core.errors import InputError
from foundation.models.checkpoint import load
from foundation.models.inputs.tokenizer import load_tokenizer
from foundation.models.size import Passes
from foundation.stage.context import Context
from foundation.training.train import Batch
from tests.distill.conftest import WORDS
from tests.word_tokenizer import write_tokenizer

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
        ("nowhere.txt", None, r"k.path: .*nowhere.txt given; give a file .* a folder of such files or a Hub id"),
        ("a.txt", "\n \n", r"k.path: .*a.txt contains no text; at least one row is needed"),
        ("a.jsonl", '{"text": 3}\n', r"a.jsonl line 1: 3 given as text"),
        ("a.csv", "other\nx\n", r"a.csv.*text"),
        ("empty", "", r"k.path: .*empty given; give a file"),
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
    kept, dropped, there = new_rows(rows, held_out, known)
    assert kept == [row for i, row in enumerate(rows) if row not in held_out | known and row not in rows[:i]]
    assert dropped == sum(row in held_out for row in rows)
    assert len(kept) + dropped + there == len(rows)


def test_blanks_around_a_text_do_not_count() -> None:
    """Files of extra text are read without them, data sets are taken as they are."""
    assert new_rows(["good film", "dull", " new"], ["good film \n"], ["\tdull"]) == ([" new"], 1, 1)
    assert new_rows([("a", "b"), ("c", "d")], [(" a", "b ")], [("c ", "d")]) == ([], 1, 1)


def test_no_text_of_a_pair_that_is_held_out_is_learned_from() -> None:
    held_out = [("a", "b"), ("c", "d")]
    assert new_rows(["a", "d", "e"], held_out, []) == (["e"], 2, 0)
    pairs = [("b", "a"), ("a", "d"), ("a", "e"), ("e", "f")]
    assert new_rows(pairs, held_out, []) == ([("a", "e"), ("e", "f")], 2, 0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from foundation.models.inputs.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, [*WORDS, "un", "##like", "##ly", "##d"])
    return load_tokenizer(str(folder))


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


@pytest.fixture(scope="module")
def bytewise() -> Any:
    """A byte-level BPE, as GPT-2 has one: a word is joined with the blank before it, and has more tokens without it."""
    from transformers import PreTrainedTokenizerFast

    from foundation.models.inputs.tokenizer import train_bpe

    texts = [" ".join(np.random.default_rng(seed).choice(WORDS, 20)) for seed in range(40)]
    return PreTrainedTokenizerFast(tokenizer_object=train_bpe(texts, 300, False).tokenizer)


LINES = st.lists(st.lists(st.sampled_from([*WORDS, "unlikely", "gre\u00e9t"]), min_size=1, max_size=30), max_size=8)


@given(LINES, st.integers(10, 24))
def test_pieces_of_bytes_keep_the_limit_too(bytewise: Any, lines: list[list[str]], max_length: int) -> None:
    pieces = packed([" ".join(line) for line in lines], bytewise, max_length)
    assert [word for piece in pieces for word in piece.split()] == [word for line in lines for word in line]
    assert all(0 < len(bytewise(piece)["input_ids"]) <= max_length for piece in pieces)
    whole = packed([" ".join(word for line in lines for word in line)], bytewise, max_length)
    for one, other in pairwise(whole):  # no piece could have taken the next word, too
        assert len(bytewise(f"{one} {other.split()[0]}")["input_ids"]) > max_length - 2


@given(st.lists(st.text(st.sampled_from("abg \u00e9\u4e16\U0001f600\n\t"), max_size=40), max_size=4), st.integers(4, 9))
def test_no_character_is_lost_or_said_twice(bytewise: Any, lines: list[str], max_length: int) -> None:
    pieces = packed(lines, bytewise, max_length)
    assert "".join("".join(pieces).split()) == "".join("".join(lines).split())
    assert all(0 < len(bytewise(piece)["input_ids"]) <= max_length for piece in pieces)


def test_a_character_of_more_tokens_than_a_row_is_a_row(bytewise: Any) -> None:
    assert packed(["a\U0001f600 b"], bytewise, 3) == ["a", "\U0001f600", "b"]


def test_lines_that_have_more_tokens_together_are_not_joined() -> None:
    """The first word of a text gets a mark that a word behind a line feed does not get."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["\u2581", "a", "b", "\n", "\u2581a", "\u2581b", "\u2581aa", "\u2581bb"]
    merges = [("\u2581", "a"), ("\u2581", "b"), ("\u2581a", "a"), ("\u2581b", "b")]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    marking = PreTrainedTokenizerFast(tokenizer_object=made)
    assert packed(["aa", "bb", "aa"], marking, 3) == ["aa", "bb", "aa"]
    assert packed(["aa", "bb", "aa"], marking, 4) == ["aa\nbb", "aa"]


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
    assert "extra_text: 30 rows; excluded: 5 in the evaluation or selection split, 5 duplicates" in "".join(told.lines)
    assert set(figures["losses"][0]) == {"epoch", "soft_target", "hard_target", "loss"}


def test_rows_without_a_label_have_no_hard_loss(make_context: Contexts, extra: Path, tmp_path: Path) -> None:
    context = make_context()

    def objective(stage: Distill) -> Any:
        from distill.steps import Steps
        from foundation.models.folder import Checkpoint
        from foundation.models.forward import freeze

        folder = context.baseline.path
        student, teacher = load(folder), freeze(load(folder))
        prepared = Checkpoint(folder).preprocessor(context.task, 16, context.target)
        steps = Steps(stage, folder, context)
        split, labelled = steps.rows()
        return steps.objective(student, [teacher], prepared, [prepared], split, labelled), split, labelled

    built, split, labelled = objective(small(extra_text={"path": str(extra)}, augment={"mask": 0.3, "copies": 2}))
    assert (labelled, len(split)) == (48, 3 * 78)
    assert built.pair.teacher.logits is None  # copies are asked anew
    indices = np.array([0, 47, 48, 77, 78, 100, 233])
    features = built.pair.rows.batch(indices)
    batch = Batch(features, torch.from_numpy(split.labels.array[indices]), indices, 3, 9)
    parts = built(built.pair.student.model, batch)
    assert (parts["hard_target"][:2] > 0).all()
    assert (parts["hard_target"][2:] == 0).all()
    torch.testing.assert_close(parts["soft_target"], torch.zeros(7), atol=1e-6, rtol=0)  # student and teacher see the same masks
    assert set(split.rows[48:78]).isdisjoint(context.data.evaluation.rows)
    mixed, split, labelled = objective(small(extra_text={"path": str(extra)}, loss="mixkd"))
    mixing = mixed(mixed.pair.student.model, Batch(features, torch.from_numpy(split.labels.array[indices % 78]), indices % 78, 3, 9))
    assert (mixing["mixed_labels"][2:4] == 0).all()
    assert (mixing["mixed_answers"] >= 0).all()


@pytest.mark.whole
def test_augmented_training_is_the_same_again(make_context: Contexts, tmp_path: Path) -> None:
    losses = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        context = make_context()
        figures = small(augment={}, epochs=0.5).run(context.baseline, context, tmp_path / name)
        losses.append(figures["losses"])
        assert (figures["rows"], figures["teacher_logits"]) == (96, "live")
    assert losses[0] == losses[1]


@pytest.mark.whole
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
    tokenizer = load_tokenizer(str(context.baseline.path))
    held_out = [*context.data.evaluation.rows, *context.data.selection.rows]
    lines, _, _ = new_rows(read_plain(PlainText(path=str(extra)), "k"), held_out, [])  # train rows are no labels here
    pieces = packed([str(line) for line in lines], tokenizer, context.max_length)
    assert len(pieces) < len(lines) == 34
    assert (figures["labelled_rows"], figures["rows"]) == (0, len(pieces) if pack else len(lines))
    before, after = load(context.baseline.path), load(tmp_path / "out")
    assert torch.equal(before.classifier.weight, after.classifier.weight)  # type: ignore[union-attr,arg-type]


def test_phases_of_a_preset_become_one_on_a_corpus(extra: Path) -> None:
    preset = small(corpus={"path": str(extra)}, loss="tinybert").resolved()
    assert [(loss.name, loss.steps) for loss in preset.losses] == [("tinybert", (0.0, 1.0))]
    assert preset.hard_weight == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": {"path": "FILE"}}, r"stages.distill.corpus: given, but soft_target compares logits; .* give loss: minilmv2"),
        ({"corpus": {"path": "FILE"}, "loss": "mixkd"}, r"corpus: given, but mixkd compares logits"),
        ({"corpus": {"path": "FILE"}, "losses": [{"name": "minilm"}, {"name": "soft_target"}]}, r"corpus: given, but soft_target compares"),
        (
            {"corpus": {"path": "FILE", "text_pair": "b"}, "loss": "minilm"},
            r"corpus.text_pair: 'b' given; a corpus is plain text: remove text_pair",
        ),
        (
            {"extra_text": {"path": "FILE", "text_pair": "b"}},
            r"extra_text: the rows of the data are single texts: remove stages.distill",
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
    assert stage.work(Passes(10, 10, 2), context.data) == 10 * (3 * 88 + 20 + 88)  # as it is read, 40 rows
    extra.write_text(extra.read_text() + "more\n")
    assert stage.depends(context) != before
    assert small().depends(context) is None


@pytest.mark.whole
def test_any_model_of_the_kind_teaches_on_a_corpus(extra: Path, make_context: Contexts, make_model: Any, tmp_path: Path) -> None:
    """A backbone without a head for the task, as pretraining leaves it."""
    import dataclasses

    from foundation.artifacts.artifact import Artifact

    folder = tmp_path / "general"
    make_model("bert", num_labels=2).bert.save_pretrained(folder)
    write_tokenizer(folder, WORDS)
    context = dataclasses.replace(make_context(), teachers=(Artifact(folder, {"id": "general", "digest": "2" * 64}),))
    (tmp_path / "out").mkdir()
    figures = small(corpus={"path": str(extra)}, loss="minilm", teacher=str(folder)).run(context.baseline, context, tmp_path / "out")
    assert figures["teacher"] == "general"
