"""A tokenizer that was cut splits the texts of its tokens as before, renumbered, and knows every other text it knew."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load
from foundation.models.folder import Checkpoint
from foundation.models.layers.conv1d import with_linears
from foundation.models.library import with_class
from prune.embeddings.vocabulary import (
    closure,
    counts_from_pad,
    cut_tokenizer,
    cut_vocabulary,
    ids_of,
    lost_tokens,
    token_ids,
    with_vocabulary,
    write_tokenizer,
)
from prune.surgery import KeptUnits, shrink

KEY = "stages.prune"
TEXTS = ["abba baab abab", "cab bac cabba", "aaaa bbbb cccc", "abc bca cab abcabc", "bab bab baba"]


@cache  # training Unigram does not give the same twice
def tokenizer_of(kind: str) -> Tokenizer:
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made: dict[str, Callable[[], tuple[Tokenizer, Any]]] = {
        "WordPiece": lambda: (
            Tokenizer(models.WordPiece(unk_token="[UNK]")),
            trainers.WordPieceTrainer(vocab_size=40, special_tokens=specials, show_progress=False),
        ),
        "BPE": lambda: (Tokenizer(models.BPE()), trainers.BpeTrainer(vocab_size=40, special_tokens=specials, show_progress=False)),
        "Unigram": lambda: (
            Tokenizer(models.Unigram()),
            trainers.UnigramTrainer(vocab_size=40, special_tokens=specials, unk_token="[UNK]", show_progress=False),
        ),
        "WordLevel": lambda: (
            Tokenizer(models.WordLevel(unk_token="[UNK]")),
            trainers.WordLevelTrainer(vocab_size=40, special_tokens=specials, show_progress=False),
        ),
    }
    tokenizer, trainer = made[kind]()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    )
    return Tokenizer.from_str(tokenizer.to_str())  # as read from a file: its reader rounds scores otherwise than the trainer


def joined(tokenizer: Tokenizer, ids: list[int]) -> str:
    return "".join(tokenizer.id_to_token(token).removeprefix("##") for token in ids)


words = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=5).map(" ".join)


@pytest.mark.parametrize("kind", ["WordPiece", "BPE", "Unigram", "WordLevel"])
@settings(max_examples=30)
@given(train=st.lists(words, min_size=1, max_size=4), others=st.lists(words, min_size=1, max_size=8))
def test_texts_of_kept_tokens_are_renumbered_and_no_other_becomes_unknown(kind: str, train: list[str], others: list[str]) -> None:
    old = tokenizer_of(kind)
    document = json.loads(old.to_str())
    kept = sorted(closure(document, {token for row in ids_of(old, train) for token in row}))
    new = Tokenizer.from_str(json.dumps(cut_tokenizer(document, kept)))
    assert new.get_vocab_size() == len(kept)
    for text, before, after in zip([*train, *others], ids_of(old, [*train, *others]), ids_of(new, [*train, *others]), strict=True):
        if set(before) <= set(kept):
            assert after == [kept.index(token) for token in before], text
        assert kind == "WordLevel" or joined(new, after) == joined(old, before), text


def test_merges_lead_to_every_kept_token() -> None:
    document = {
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "bc": 5, "ca": 6},
            "merges": [["a", "b"], "ab c", ["b", "c"], ["c", "a"]],
        },
        "added_tokens": [],
    }
    kept = sorted(closure(document, {4}))
    assert kept == [0, 1, 2, 3, 4]
    cut = cut_tokenizer(document, kept)
    assert cut["model"]["vocab"] == {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
    assert cut["model"]["merges"] == [["a", "b"], ["ab", "c"]]


def test_a_config_gets_the_new_ids_of_its_tokens(make_model: Any) -> None:
    config = make_model("gpt2", pad_token_id=19, bos_token_id=7, eos_token_id=None).config
    config.eos_token_id = [7, 9]
    assert token_ids(config) == {7, 9, 19}
    changed = with_vocabulary(config, [0, 7, 9, 19])
    assert (changed.pad_token_id, changed.bos_token_id, changed.eos_token_id, changed.vocab_size) == (3, 1, [1, 2], 4)
    assert config.pad_token_id == 19


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_checkpoint_gets_a_tokenizer_that_fits(kind: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint(kind)
    prepared = Checkpoint(folder).preprocessor("text-classification", 16, Target())
    train, selection = ["very good film", "very bad movie", "good good"], ["good film", "a dull film", "hate"]
    cut = cut_vocabulary(folder, load(folder).config, prepared, train, selection, KEY)
    assert len(cut.kept) == 5 + 5
    assert cut.kept[:5] == [0, 1, 2, 3, 4]
    # of 4 + 5 + 3 tokens dull and hate became unknown; "a" was unknown before
    assert cut.unknown == pytest.approx(2 / 12)
    assert cut.changed == pytest.approx(2 / 3)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    write_tokenizer(folder, cut, tmp_path)
    assert not (tmp_path / "vocab.txt").exists()
    loaded = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert loaded("very bad film")["input_ids"] == [cut.kept.index(token) for token in prepared.tokenizer.encode("very bad film").ids]  # type: ignore[union-attr]
    assert loaded.convert_ids_to_tokens(loaded.mask_token_id) == "[MASK]"


def test_a_tokenizer_that_cannot_be_cut_exactly_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The word is unknown to the long pieces, and would not be to the short ones that are left."""
    folder = checkpoint("bert")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5, "ab": 6, "##bc": 7, "xab": 8, "x": 9}
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["vocab"] = vocabulary
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    prepared = Checkpoint(tmp_path).preprocessor("text-classification", 16, Target())
    with pytest.raises(InputError, match="WordPiece tokenizer cannot be cut exactly"):
        cut_vocabulary(tmp_path, load(folder).config, prepared, ["abc", "xbc"], [], KEY)


def test_a_pad_token_at_the_end_holds_no_other(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Positions of GPT-2 are counted from the first token on, whatever the id of the pad token is."""
    words = ["[UNK]", "[CLS]", "[SEP]", "bad", "dull", "film", "good", "very", "[PAD]"]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(tmp_path)
    config = transformers.GPT2Config(
        vocab_size=9, n_positions=40, n_layer=2, n_embd=16, n_head=4, pad_token_id=8, bos_token_id=1, eos_token_id=2
    )
    model: Any = with_linears(transformers.GPT2ForSequenceClassification(with_class(config, "text-classification"))).eval()
    prepared = preprocessor_of(model, tmp_path)
    train = ["very good film", "good"]
    cut = cut_vocabulary(tmp_path, model.config, prepared, train, ["film film"], KEY)
    assert cut.kept == [0, 1, 2, 5, 6, 7, 8]
    assert cut.unknown == 0
    assert counts_from_pad(load(checkpoint("roberta")).config, KEY)
    assert not counts_from_pad(load(checkpoint("bert")).config, KEY)
    structure = Structure.of(model, KEY)
    small: Any = shrink(model, structure, replace(KeptUnits.everything(structure.sizes), vocabulary=cut.kept), KEY)
    assert small.config.pad_token_id == 6
    rows = torch.tensor([[7, 6, 5], [6, 8, 8]])
    with torch.no_grad():
        expected = model(input_ids=rows).logits
        found = small(input_ids=torch.tensor([[cut.kept.index(token) for token in row] for row in rows.tolist()])).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def preprocessor_of(model: Any, folder: Path) -> Any:
    from foundation.models.checkpoint import save

    tokenizer = folder / "with-weights"
    tokenizer.mkdir()
    save(model, folder, tokenizer, "drawn")
    return Checkpoint(tokenizer).preprocessor("text-classification", 16, Target())


def pairs_of_letters(vocab: dict[str, int]) -> Tokenizer:
    """A tokenizer that marks the end of words, and has no token for what is unknown."""
    merges = [("a", "b</w>")] if "ab</w>" in vocab else []
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_last_characters_of_words_are_characters() -> None:
    vocab = {"a": 0, "b": 1, "z": 2, "a</w>": 3, "b</w>": 4, "z</w>": 5, "ab</w>": 6, "za</w>": 7}
    assert closure(json.loads(pairs_of_letters(vocab).to_str()), {6}) == {0, 1, 2, 3, 4, 5, 6}


def test_text_that_no_token_stands_for_is_lost() -> None:
    old = pairs_of_letters({"a": 0, "b": 1, "z": 2, "a</w>": 3, "b</w>": 4, "z</w>": 5, "ab</w>": 6})
    new = pairs_of_letters({"a": 0, "b": 1, "a</w>": 2, "b</w>": 3})
    assert new.encode("z").ids == []
    for row, lost in (("ab", 0), ("z", 1), ("az ab", 1), ("zz ba", 2), (("z", "a z"), 2), ("q z", 1)):
        assert lost_tokens(old, new, [row]) == lost, row
    assert lost_tokens(old, new, ["ab", "z", "zz"]) == 3
    assert lost_tokens(old, old, ["ab", "z", "q"]) == 0


def test_a_token_that_becomes_known_makes_up_for_none_that_becomes_unknown() -> None:
    def of(*words: str) -> Tokenizer:
        tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(("[UNK]", *words))}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        return tokenizer

    assert lost_tokens(of("x", "z"), of("y", "z"), ["x y", "y", "z z"]) == 1
