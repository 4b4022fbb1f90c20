"""Windows against the features that the example for SQuAD of Transformers makes, by Transformers' own truncation with overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from compress.reading.questions import span_in
from compress.reading.squad import Gold
from foundation.standalone.preprocess import Preprocessor
from foundation.standalone.windows import Window, joined, paired, parted, read_contexts, windows
from tests import questions

ROWS = questions.rows(120, unanswerable=0.2)
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


def byte_level() -> Tokenizer:
    """Returns a tokenizer with pairs as RoBERTa has them, whose tokens hold the space before a word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(["<s>", "</s>", "<pad>", *letters])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets=False)
    return made


def prepared(max_length: int, stride: int, engine: Tokenizer | None = None) -> Preprocessor:
    names = ("input_ids", "attention_mask", "token_type_ids")
    return Preprocessor("text", names, ("start", "end"), "question-answering", max_length, (max_length,), response="span", stride=stride,
                        tokenizer=engine or questions.tokenizer())  # fmt: skip


def example(tokenizer: Any, row: dict[str, Any], max_length: int, stride: int) -> list[tuple[list[int], list[int], int, int]]:
    """Returns ids, token types and the positions of the answer of all features: `prepare_train_features` of run_qa.py, written out."""
    made = tokenizer(
        row["question"].lstrip(), row["context"], truncation="only_second", max_length=max_length, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True, return_token_type_ids=True,
    )  # fmt: skip
    features = []
    for number, offsets in enumerate(made["offset_mapping"]):
        ids, sequence, answers = made["input_ids"][number], made.sequence_ids(number), row["answers"]
        start = end = 0  # the index of CLS
        if answers["answer_start"]:
            start_char = answers["answer_start"][0]
            end_char = start_char + len(answers["text"][0])
            first, last = 0, len(ids) - 1
            while sequence[first] != 1:
                first += 1
            while sequence[last] != 1:
                last -= 1
            if offsets[first][0] <= start_char and offsets[last][1] >= end_char:
                while first < len(offsets) and offsets[first][0] <= start_char and sequence[first] == 1:
                    first += 1
                start = first - 1
                while offsets[last][1] >= end_char and sequence[last] == 1:
                    last -= 1
                end = last + 1
        features.append((ids, made["token_type_ids"][number], start, end))
    return features


@pytest.mark.parametrize(("max_length", "stride"), [(48, 12), (32, 10), (24, 3), (19, 0), (512, 128)])
def test_features_are_those_of_the_example(max_length: int, stride: int) -> None:
    theirs = AutoTokenizer.from_pretrained(questions.checkpoint())
    ours, several = prepared(max_length, stride), 0
    for row in ROWS:
        pair = row["question"].lstrip(), row["context"]
        golds = [Gold(*gold) for gold in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)]
        (tokens,) = paired(ours.tokenizer, [pair])
        made = windows(pair, tokens, max_length, stride)
        wanted = example(theirs, row, max_length, stride)
        assert [ids[0].tolist() for ids in ours.tokenized(made)] == [ids for ids, _, _, _ in wanted]
        assert [ids[2].tolist() for ids in ours.tokenized(made)] == [types for _, types, _, _ in wanted]
        assert [span_in(window, tokens, golds) for window in made] == [(start, end) for _, _, start, end in wanted]
        several += len(made) > 1
    assert (several > 2) == (max_length < 512)


def test_tokens_that_hold_spaces_give_the_same_features() -> None:
    engine = byte_level()
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), pad_token="<pad>", cls_token="<s>", sep_token="</s>")
    ours = prepared(96, 20, engine)
    for row in ROWS[:15]:
        pair = row["question"], row["context"]
        (tokens,) = paired(engine, [pair])
        made = windows(pair, tokens, 96, 20)
        assert [ids[0].tolist() for ids in ours.tokenized(made)] == [ids for ids, _, _, _ in example(theirs, row, 96, 20)]
        shown = [row["context"][start:end] for start, end in tokens.characters.tolist()]
        assert not any(text.startswith(" ") for text in shown)


def test_the_question_is_never_cut_and_one_that_leaves_no_room_is_refused() -> None:
    engine, context = questions.tokenizer(), "it rained . " * 10
    pair = "what colour is bob ? " * 3, context
    (tokens,) = paired(engine, [pair])
    for window in windows(pair, tokens, 32, 4):
        (made,) = Window.tokens([window], engine)
        assert made[0, : tokens.first].tolist() == tokens.ids[: tokens.first].tolist()
    with pytest.raises(ValueError, match=r"question .* 18 of the 22 tokens .* context share 4"):
        windows(pair, tokens, 22, 4)
    short = ("what ?", "it rained .")
    (few,) = paired(engine, [short])
    assert len(windows(short, few, 8, 7)) == 1  # it fits as a whole, so nothing has to be shared
    with pytest.raises(ValueError, match="a context without a token"):
        windows(("what ?", " "), paired(engine, [("what ?", " ")])[0], 32, 4)


def test_joined_logits_are_parted_again() -> None:
    ours = prepared(24, 4)
    pairs = [(row["question"], row["context"]) for row in ROWS[:6]]
    found = read_contexts(ours, pairs)
    rows = [window for one in found for window in one.rows]
    owners = [one for one in found for _ in one.rows]
    lengths = [made.shape[1] for made in ours.tokenized(rows)]
    logits = np.random.default_rng(0).standard_normal((len(rows), 24, 2)).astype(np.float32)
    whole = joined(found, logits)
    by_owner = {id(one): values for one, values in zip(found, whole, strict=True)}
    again = parted(owners, rows, np.stack([by_owner[id(one)] for one in owners]))
    for length, before, after in zip(lengths, logits, again, strict=True):
        assert after[:length].tolist() == before[:length].tolist()
        assert not after[length:].any()
    assert whole.shape[1] == max(sum(read.length for read in one.windows) for one in found)


def test_saved_preprocessors_read_windows_alike(tmp_path: Any) -> None:
    ours = prepared(24, 4)
    ours.save(tmp_path)
    again = Preprocessor.load(tmp_path)
    pair = ROWS[0]["question"], ROWS[0]["context"]
    assert [one.rows for one in read_contexts(again, [pair])] == [one.rows for one in read_contexts(ours, [pair])]
    assert (again.stride, again.null_threshold, again.per_token) == (4, None, True)
