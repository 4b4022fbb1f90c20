"""Which rows belong together, for the rows of every task."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from compress.reading.load import load_data
from foundation.core.resampling import FEW, FEWEST, Groups, interval
from foundation.data.config import DataConfig
from foundation.data.groups import groups_of_rows, groups_of_split, groups_of_values
from foundation.data.splits import Split
from foundation.labels import candidates, captions, next_token, relevance, spans, tags, text_groups, transcripts, vectors, zero_shot
from foundation.labels.classes import ClassIds
from foundation.labels.label_sets import LabelSets
from foundation.measure.answers import load_groups, save_predictions
from foundation.models.inputs.tokenizer import TrainTokenizer
from foundation.standalone.preprocess import TokenPair
from foundation.standalone.windows import Window
from tests import entities


def groups(split: Split) -> list[int]:
    return groups_of_values(split).tolist()


def test_questions_are_grouped_by_their_context_whatever_its_windows() -> None:
    asked = [("who?", "ann is here"), ("who?", "bob is here"), ("where?", "ann is here")]
    rows = [Window(*pair, start, start + 2) for pair in asked for start in (0, 1)]
    numbers = [0, 0, 1, 1, 2, 2]
    labels = spans.labels_of(np.zeros((6, 2)), numbers, [True] * 3, [["ann"]] * 3)
    assert groups(Split(list(rows), labels)) == [0, 1, 0]


def test_pairs_are_grouped_by_the_side_that_repeats_unless_it_is_a_category() -> None:
    premises = [(f"premise {number // 3}", f"hypothesis {number}") for number in range(3 * FEW)]
    assert groups_of_rows(premises).tolist() == [number // 3 for number in range(3 * FEW)]
    passages = [(second, first) for first, second in premises]
    assert groups_of_rows(passages).tolist() == groups_of_rows(premises).tolist()
    topics = [(f"topic {number % (FEW - 1)}", f"comment {number}") for number in range(3 * FEW)]
    assert groups_of_rows(topics).tolist() == list(range(3 * FEW))


def test_every_row_of_a_split_is_in_the_group_of_its_value() -> None:
    asked = [("who?", "ann is here"), ("who?", "bob is here"), ("where?", "ann is here")]
    rows = [Window(*pair, start, start + 2) for pair in asked for start in (0, 1)]
    labels = spans.labels_of(np.zeros((6, 2)), [0, 0, 1, 1, 2, 2], [True] * 3, [["ann"]] * 3)
    assert groups_of_split(Split(list(rows), labels)).tolist() == [0, 0, 1, 1, 0, 0]
    scored = Split(["a", "b", "c", "d", "a", "b"], vectors.labels_of(np.array([0.1, 0.2, 0.1])))
    numbers = groups_of_split(scored)
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]
    texts = Split(["a", "b", "a"], ClassIds(np.zeros(3, np.int64)))
    assert groups_of_split(texts).tolist() == [0, 1, 0]
    documents = np.arange(2 * FEW) // 2
    blocks = Split([np.full(4, row) for row in range(2 * FEW)], next_token.Tokens(np.zeros((2 * FEW, 4), np.int32)), documents)
    assert groups_of_split(blocks).tolist() == documents.tolist()


def test_rows_of_equal_content_are_one_group() -> None:
    assert groups_of_rows(["a", "b", "a"]).tolist() == [0, 1, 0]
    assert groups_of_rows([b"x", b"x"]).tolist() == [0, 0]
    pairs = [TokenPair(np.int32(source), np.int32(target)) for source, target in (([1, 2], [3]), ([1, 2], [4]), ([1], [3]))]
    assert groups(Split(list(pairs), next_token.labels_of(pairs, 2))) == [0, 0, 1]


def test_values_of_several_rows_have_one_group_each() -> None:
    listed = candidates.labels_of([0, 0, 1, 1, 2], [1, 0, 0, 1, 0], [[1], [1], [1]])
    assert groups(Split([("q", "a"), ("q", "b"), ("r", "a"), ("r", "c"), ("q", "d")], listed)) == [0, 1, 0]
    sides = np.array([zero_shot.IMAGE, zero_shot.IMAGE, zero_shot.TEXT, zero_shot.TEXT, zero_shot.TEXT])
    described = zero_shot.labels_of(sides, np.array([0, 1, 0, 0, 1]), np.full(5, captions.CAPTION))
    assert groups(Split([b"x", b"y", "a", "b", "c"], described)) == [0, 1]
    searched = relevance.labels_of(2, 2, [(0, 0, 1), (1, 1, 1)])
    assert groups(Split(["q", "r", "a", "b"], searched)) == [0, 1]
    scored = vectors.labels_of(np.array([0.1, 0.2]))
    assert groups(Split(["a", "b", "a", "c"], scored)) == [0, 1]  # a side with so few texts is a category
    triplets = text_groups.labels_of([("a", "p", "n"), ("b", "p", "m")])
    assert groups(Split(["a", "p", "n", "b", "p", "m"], triplets)) == [0, 1]


def test_every_form_has_as_many_rows_of_values_as_values() -> None:
    draw = np.random.default_rng(0)
    sides = np.array([0, 0, 1, 1])
    made = {
        "captions": (captions.labels_of(sides, np.array([0, 1, 0, 1])), (4, 3)),
        "images and texts": (zero_shot.labels_of(sides, np.array([0, 1, 0, 1])), (4, 3)),
        "tags": (tags.Tags(np.tile(np.array([[[0, -1], [1, -1], [0, 0], [1, 1]]], np.int32), (3, 1, 1))), (3, 2, 2)),
        "transcripts": (transcripts.Transcripts(np.array([[[2, 97, 98, -1], [0, 1, 2, -1]]] * 2, np.int32)), (2, 3, 10)),
        "spans": (spans.labels_of(np.zeros((4, 2)), [0, 0, 1, 2], [True] * 3, [["a"]] * 3), (4, spans.Part.WORDS.stop)),
        "queries and documents": (relevance.labels_of(2, 3, [(0, 0, 1), (1, 1, 1)]), (5, 3)),
        "candidates": (candidates.labels_of([0, 0, 1, 1], [1, 0, 0, 1], [[1], [1]]), (4, 1)),
        "pairs and triplets": (text_groups.labels_of([("a", "p", "n"), ("b", "q", "m")]), (6, 3)),
        "pairs": (vectors.labels_of(np.array([0.1, 0.2])), (4, 3)),
        "sets": (LabelSets(np.ones((3, 2), bool)), (3, 2)),
        "tokens": (next_token.Tokens(np.ones((3, 4), np.int32)), (3, 4, 2)),
    }
    for form, (labels, shape) in made.items():
        values, _ = labels.values(draw.random(shape).astype(np.float32))
        assert len(labels.rows_of_values()) == len(values), form


def test_sentences_are_grouped_by_the_documents_of_a_file(tmp_path: Path) -> None:
    said = "Ann B-PER\nlives O\n\nin O\nOslo B-LOC\n\n"
    documents = f"-DOCSTART- -X- O\n\n{said}-DOCSTART- -X- O\n\nBob B-PER\nleft O\n\n"
    (tmp_path / "train.conll").write_text(documents.replace("O\n\n", "O\nagain O\n\n"))
    (tmp_path / "test.conll").write_text(documents)
    config = DataConfig(path=str(tmp_path), max_length=32)
    data = load_data(config, "token-classification", None, lambda line: None, str(entities.checkpoint()))
    assert groups(data.evaluation) == [0, 0, 1]
    (tmp_path / "test.conll").write_text(documents.replace("-DOCSTART- -X- O\n\n", ""))
    data = load_data(config, "token-classification", None, lambda line: None, str(entities.checkpoint()))
    assert groups(data.evaluation) == [0, 1, 2]


def test_blocks_are_grouped_by_documents_or_by_neighbours(tmp_path: Path) -> None:
    def read(texts: list[str]) -> Split:
        rows = [f'{{"text": "{text}"}}' for text in texts]
        (tmp_path / "train.jsonl").write_text("\n".join(rows))
        (tmp_path / "test.jsonl").write_text("\n".join(rows[: len(rows) // 2]))
        config = DataConfig(path=str(tmp_path), max_length=8)
        return load_data(config, "text-generation", None, lambda line: None, TrainTokenizer(train="bpe", vocab_size=260)).evaluation

    draw = np.random.default_rng(0)
    many = read([" ".join(draw.choice(["one", "two", "three", "four"], 40)) for _ in range(80)])
    assert len(set(groups(many))) == 40 < len(many)
    assert sorted(groups(many)) == groups(many)
    one = read([" ".join(draw.choice(["one", "two", "three", "four"], 1200)) for _ in range(2)])
    length = round(len(one) ** (1 / 3))
    assert length > 1
    assert groups(one) == [place // length for place in range(len(one))]


def test_groups_are_stored_beside_predictions(tmp_path: Path) -> None:
    save_predictions(tmp_path / "with", np.zeros((2, 2)), ClassIds(np.array([0, 1])), np.array([3, 3]))
    save_predictions(tmp_path / "without", np.zeros((2, 2)), ClassIds(np.array([0, 1])))
    found = load_groups(tmp_path / "with")
    assert found is not None
    assert found.tolist() == [3, 3]
    assert load_groups(tmp_path / "without") is None


def test_whole_groups_are_drawn_and_too_few_give_no_interval() -> None:
    numbers = np.array([7, 2, 7, 2, 9])
    drawn = Groups(numbers)
    assert (len(drawn), drawn.sizes.tolist()) == (3, [2, 2, 1])
    assert drawn.rows(np.array([0, 2, 0])).tolist() == [0, 2, 4, 0, 2]
    assert interval(lambda rows: float(rows.mean()), drawn) == (None, None)
    rows = np.arange(8 * FEWEST)
    assert None not in interval(lambda chosen: float(chosen.mean()), Groups(rows // 8))


def test_an_empty_text_is_shared_by_nobody() -> None:
    rows = [(f"sentence {number}", "") for number in range(6)] + [(f"a {number}", f"b {number % FEW}") for number in range(3 * FEW)]
    found = groups_of_rows(rows)
    assert len(set(found[:6].tolist())) == 6
    assert len(set(found[6:].tolist())) == FEW
    assert not set(found[:6].tolist()) & set(found[6:].tolist())
