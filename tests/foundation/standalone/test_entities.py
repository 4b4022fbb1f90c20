"""Entities of a text against the pipeline of Transformers on the same model, and the words that tokens belong to."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForTokenClassification, AutoTokenizer, PreTrainedTokenizerFast, pipeline

from foundation.core.target import Target
from foundation.labels import tags
from foundation.labels.tags import first_pieces
from foundation.models.folder import Checkpoint
from foundation.standalone.confidence import SURE, Score, confidence
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.response import RESPONSES, STRATEGIES, placed
from tests import entities

TEXTS = [
    "ann saw bob in osloby , carl romes.",
    "Bobson lives in new york.rome, and the  zzyzx saw ann",
    "the",
    "",
    "caf\u00e9 \u65e5\u672c ann \U0001f600 bob",
    "osloromes yorkann bobcarl newyork annbob",
]
PLAIN = ["ann saw bob in osloby and carl romes", "the", "", "osloromes yorkann bobcarl newyork annbob", "ann bob new york rome"]
"""Texts whose words Transformers tells apart as we do: it takes punctuation for words."""


def byte_level(folder: Path) -> Path:
    """A tokenizer without a prefix for what goes on a word."""
    engine = Tokenizer(models.BPE(unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {token: number for number, token in enumerate([*specials, *alphabet])}
    engine.model = models.BPE(vocabulary, [], unk_token="[UNK]")
    engine.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=engine, model_max_length=64, **names).save_pretrained(folder)
    return folder


def prepared(folder: Path) -> Preprocessor:
    return Checkpoint(folder).preprocessor("token-classification", 64, Target(sequence_lengths=(16,)))


def served(model: Any, made: Preprocessor, strategy: str, texts: list[str]) -> list[list[dict[str, Any]]]:
    with torch.no_grad():
        logits = model(**{name: torch.from_numpy(values) for name, values in made.encode(texts).items()}).logits.numpy()
    form = "entities" if strategy == STRATEGIES[0] else f"entities-{strategy}"
    found = RESPONSES[form].of(logits, made.labels, placed(made, texts))["ENTITIES"]
    return [json.loads(row[0]) for row in found]


@pytest.mark.parametrize(("strategy", "bytewise"), [*((name, False) for name in STRATEGIES), ("none", True), ("simple", True)])
def test_entities_are_those_of_transformers(strategy: str, bytewise: bool, tmp_path: Path) -> None:
    model = AutoModelForTokenClassification.from_pretrained(entities.checkpoint(2)).eval()
    folder = entities.checkpoint(2)
    if bytewise:
        folder = byte_level(tmp_path)
        model.resize_token_embeddings(300)
        model.save_pretrained(folder)
    theirs = pipeline("token-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(folder), aggregation_strategy=strategy)
    texts = TEXTS if strategy in ("none", "simple") else PLAIN
    found = served(model, prepared(folder), strategy, texts)
    assert sum(map(len, found)) > (5 if texts is TEXTS else 1)
    for text, ours in zip(texts, found, strict=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # how words are told apart without a prefix
            expected = theirs(text) if text else []
        key = "entity" if strategy == "none" else "entity_group"
        assert [(one["entity"], one["start"], one["end"]) for one in ours] == [(one[key], one["start"], one["end"]) for one in expected]
        assert [one["score"] for one in ours] == pytest.approx([float(one["score"]) for one in expected], abs=2e-6)
        assert [one["text"] for one in ours] == [text[one["start"] : one["end"]] for one in expected]


def test_rows_differ_by_entities_and_by_scores_that_are_apart() -> None:
    base = {"entity": "A", "start": 0, "end": 1, "text": "x", "score": 0.5}
    rows = [[base], [base | {"score": 0.500001}], [base | {"score": 0.51}], [base | {"end": 2}], []]
    given, wanted = (np.array([[json.dumps(row).encode()] for row in side], object) for side in (rows, [[base]] * 5))
    assert RESPONSES["entities"].differ(given, wanted).tolist() == [False, False, True, True, True]


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[n, tokens, 5\] expected"):
        RESPONSES["entities"].of(np.zeros((1, 5), np.float32), entities.NAMES, [("a", ())])


def test_a_space_before_a_token_belongs_to_its_word() -> None:
    engine = Tokenizer(models.Unigram([("<unk>", 0.0), ("\u2581", -1.0), ("\u2581ann", -1.0), ("bob", -1.0), ("s", -2.0)], unk_id=0))
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    [found, empty] = first_pieces(engine, ["ann bobs ann", ""])
    tokens = engine.encode("ann bobs ann").tokens
    assert tokens == ["\u2581ann", "\u2581", "bob", "s", "\u2581ann"]
    assert found.tolist() == [0, 2, 4]  # a lone space is no word's token
    assert empty.tolist() == [-1]


@pytest.mark.parametrize("scheme", [("B", "I", "E", "S"), ("B", "I", "L", "U")])
def test_entities_of_every_scheme_begin_and_go_on(scheme: tuple[str, str, str, str]) -> None:
    begin, inside, last, single = scheme
    names = ("O", *(f"{prefix}-A" for prefix in scheme))
    told = [f"{begin}-A", f"{inside}-A", f"{last}-A", f"{single}-A", f"{single}-A", "O"]
    logits = 9 * np.eye(5, dtype=np.float32)[[names.index(name) for name in told]]
    tokens = tuple((place, 2 * place, 2 * place + 1) for place in range(6))
    [row] = RESPONSES["entities"].of(logits[None], names, [("a b c d e f", tokens)])["ENTITIES"].tolist()
    assert [(one["entity"], one["text"]) for one in json.loads(row[0])] == [("A", "a b c"), ("A", "d"), ("A", "e")]


SCHEMES = {"IO": "I", "BIO": "BI", "BIOES": "BIES", "BILOU": "BILU"}
PLACE = {"B": "B", "I": "I", "E": "E", "S": "S", "L": "E", "U": "S"}


def chunks(tags: list[str]) -> list[tuple[int, int, str]]:
    """The entities by the two tables of conlleval, as seqeval 1.2.2 has them: where a chunk ends, and where one begins."""
    found, begin, before, kind_before = [], 0, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        now, kind = ("O", "") if tag == "O" else (PLACE[tag[0]], tag[2:])
        other = kind_before != kind
        if (before in "ES" or (before in "BI" and now in "BSO") or (before != "O" and other)) and before != "O":
            found.append((begin, place, kind_before))
        if now in "BS" or (now in "EI" and before in "ESO") or (now != "O" and other):
            begin = place
        before, kind_before = now, kind
    return found


@given(st.sampled_from(sorted(SCHEMES)), st.data())
def test_served_entities_are_those_that_are_scored(scheme: str, data: st.DataObject) -> None:
    names = ("O", *(f"{prefix}-{kind}" for kind in "AB" for prefix in SCHEMES[scheme]))
    row = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=8))  # malformed rows among them
    words = data.draw(st.lists(st.sampled_from(["U.S.", "York,", "ann", "bobson", "(rome)"]), min_size=len(row), max_size=len(row)))
    text, tokens, pieces, first = " ".join(words), [], [], 0
    for word in words:  # a token for each character
        pieces.append(len(tokens))
        tokens += [(len(tokens) + number, first + number, first + number + 1) for number in range(len(word))]
        first += len(word) + 1
    logits = np.random.default_rng(len(text)).normal(size=(1, len(tokens), len(names))).astype(np.float32)
    logits[0, pieces, [names.index(tag) for tag in row]] = 9
    answers = tags.of_words(logits, [np.array(pieces)], 10)
    labels = tags.labels_of([row], [np.array(pieces)], names)
    assert labels.values(answers)[0][0].tolist() == [len(chunks(row))] * 3
    assert tags.spans_of(row) == chunks(row)
    served_row = RESPONSES["entities"].of(logits, names, [(text, tuple(tokens))])["ENTITIES"].tolist()[0]
    expected = [(kind, " ".join(words[begin:end])) for begin, end, kind in chunks(row)]
    assert [(one["entity"], one["text"]) for one in json.loads(served_row[0])] == expected


def test_words_without_a_token_end_an_entity() -> None:
    names = ("O", "B-A", "I-A")
    logits = 9 * np.eye(3, dtype=np.float32)[[[1, 2]]]
    [row] = RESPONSES["entities"].of(logits, names, [("a ? b c", ((0, 0, 1), (1, 4, 5)))])["ENTITIES"].tolist()
    assert [one["text"] for one in json.loads(row[0])] == ["a", "b"]


@given(st.lists(st.sampled_from(["ann", "bob", "zz,yx", "new-york", "\u65e5\u672c", "\x07", "."]), max_size=7), st.integers(3, 12))
def test_a_score_is_of_the_words_that_training_and_metric_see(words: list[str], length: int) -> None:
    """The part of the logits that a served cascade goes by is the one that was certified."""
    engine = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "ann": 4}, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made = Preprocessor(
        "text", ("input_ids",), ("O", "B-X"), "token-classification", length, (length,), response="entities", tokenizer=engine
    )
    logits = np.random.default_rng(0).normal(size=(2, length, 2)).astype(np.float32)
    texts = [" ".join(words), "ann bob"]
    expected = tags.of_words(logits, first_pieces(made.tokenizer, texts), length)
    found = RESPONSES["entities"].scored(logits, placed(made, texts))
    width = max(found.shape[1], expected.shape[1])
    both = [np.pad(one, ((0, 0), (0, width - one.shape[1]), (0, 0))) for one in (found, expected)]
    np.testing.assert_array_equal(*both)
    nothing = RESPONSES["entities"].scored(logits[:1], placed(made, [""]))
    assert confidence(nothing, Score(name="margin", form="tags", temperature=1, weights=[], bias=[])).tolist() == [SURE], (
        "a text without words"
    )
