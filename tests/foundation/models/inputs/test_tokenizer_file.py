"""One tokenizer for training, windows, engines and server: tokenizer.json, with the settings of tokenizer_config.json that classes read."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto import tokenization_auto

from foundation.core.errors import InputError
from foundation.core.target import Target
from foundation.models.config import ModelConfig
from foundation.models.folder import Checkpoint
from foundation.models.importing import import_model
from foundation.models.inputs.tokenizer import load_tokenizer, target_engine
from foundation.models.inputs.tokenizer_file import (
    FILE,
    SETTINGS,
    class_inputs,
    settings_of,
    token_types_note,
    tokenizer_file,
    unlike_class,
    write_tokenizer,
)
from tests import tiny_embedding

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZäé12.,'/"
TEXTS = st.text(st.sampled_from(f"{LETTERS} \t…½\ufb01é中İ"), max_size=30)
_SCRATCH = tempfile.TemporaryDirectory(prefix="tokenizers-")  # removed when the test run ends


def bert(**settings: Any) -> Tokenizer:
    letters = [*LETTERS, *(f"##{letter}" for letter in LETTERS)]
    made = Tokenizer(models.WordPiece({piece: number for number, piece in enumerate([*SPECIALS, *letters])}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(**{"lowercase": True, **settings})
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(list(SPECIALS))
    return made


def unigram(ends: bool) -> Tokenizer:
    """As Transformers 4 saved DeBERTa-v2 and T5: compatibility forms are normalized, which the classes of Transformers 5 leave out."""
    pieces = ["<pad>", "</s>", "<unk>", "[CLS]", "[SEP]", "▁", *LETTERS, *(f"▁{letter}" for letter in LETTERS)]
    made = Tokenizer(models.Unigram([(piece, -float(number > 4)) for number, piece in enumerate(pieces)], unk_id=2))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    if ends:
        made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 3), ("[SEP]", 4)])
    return made


def byte_level(**settings: Any) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(["<s>", "<pad>", "</s>", *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **settings})
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return made


CASES: dict[str, tuple[Tokenizer, str]] = {
    "bert": (bert(), "BertTokenizer"),
    "cased bert": (bert(lowercase=False, handle_chinese_chars=False), "BertTokenizer"),
    "deberta": (unigram(ends=True), "DebertaV2Tokenizer"),
    "t5": (unigram(ends=False), "T5Tokenizer"),
    "roberta": (byte_level(trim_offsets=False), "RobertaTokenizer"),
    "qwen": (byte_level(use_regex=False), "Qwen2Tokenizer"),
    "generic": (bert(lowercase=False), "PreTrainedTokenizerFast"),
    "without a class": (bert(lowercase=False), ""),
}


def write(folder: Path, made: Tokenizer, kind: str = "", model_type: str = "bert", **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / FILE))
    (folder / SETTINGS).write_text(json.dumps({**({"tokenizer_class": kind} if kind else {}), **settings}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@cache
def case(name: str) -> tuple[Path, Any]:
    folder = write(Path(_SCRATCH.name) / name, *CASES[name])
    return folder, load_tokenizer(str(folder))


@pytest.mark.parametrize("name", CASES)
@given(text=TEXTS)
def test_every_reader_encodes_as_the_file_says(name: str, text: str) -> None:
    folder, loaded = case(name)
    file = Tokenizer.from_file(str(folder / FILE))
    assert loaded(text)["input_ids"] == file.encode(text).ids == tokenizer_file(folder).tokenizer().encode(text).ids
    ours, theirs = loaded.backend_tokenizer.encode(text, text[::-1]), file.encode(text, text[::-1])
    assert (ours.ids, ours.type_ids, ours.offsets) == (theirs.ids, theirs.type_ids, theirs.offsets)
    assert target_engine(str(folder)).encode(text).ids == file.encode(text).ids


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_keeps_the_file_and_transformers_reads_it_as_this_run_does(name: str, tmp_path: Path) -> None:
    folder = case(name)[0]
    for name in (FILE, SETTINGS, "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    list(write_tokenizer(folder, tmp_path, {}))
    assert (tmp_path / FILE).read_bytes() == (folder / FILE).read_bytes()
    loaded, file = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_file(str(folder / FILE))
    for text in ("It's ½ of the ﬁrst… 中文 Ä", "  two   spaces ", "a", "Bad GOOD éa"):
        assert loaded(text)["input_ids"] == file.encode(text).ids


def test_a_class_that_encodes_otherwise_is_named_once(tmp_path: Path) -> None:
    folder, _ = case("deberta")
    line = unlike_class(folder, tokenizer_file(folder))
    assert line is not None
    assert "DebertaV2Tokenizer" in line
    assert list(write_tokenizer(folder, tmp_path, {})) == [line]
    assert unlike_class(case("bert")[0], tokenizer_file(case("bert")[0])) is None


def test_special_tokens_have_the_names_of_the_class(tmp_path: Path) -> None:
    extra = [AddedToken("<one>", special=True)]
    made = bert()
    made.add_special_tokens(extra)
    folder = write(tmp_path, made, "BertTokenizer", extra_special_tokens=["<one>"], model_max_length=77, padding_side="left")
    loaded, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    for name in ("special_tokens_map", "all_special_ids", "model_max_length", "padding_side", "mask_token_id", "pad_token_id"):
        assert getattr(loaded, name) == getattr(theirs, name)
    assert len(loaded) == len(theirs)
    ids = loaded("a <one> b")["input_ids"]
    assert loaded.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_without_a_file_the_class_builds_the_one_that_all_read(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*SPECIALS, "good", "film", "##s"]))
    (folder / SETTINGS).write_text(json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": False}))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    out = tmp_path / "out"
    out.mkdir()
    list(write_tokenizer(folder, out, {}))
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in ("good films", "Good film", "été"):
        ids = theirs(text)["input_ids"]
        assert Tokenizer.from_file(str(out / FILE)).encode(text).ids == load_tokenizer(str(folder))(text)["input_ids"] == ids


@pytest.mark.parametrize(
    ("made", "kind", "settings", "text"),
    [
        (bert(lowercase=False), "BertTokenizer", {"do_lower_case": True}, "A"),
        (bert(), "BertTokenizer", {"do_lower_case": False}, "A"),
        (bert(), "BertTokenizer", {"strip_accents": False}, "é"),
        (bert(strip_accents=False), "BertTokenizer", {"strip_accents": None}, "é"),
        (bert(), "BertTokenizer", {"tokenize_chinese_chars": False}, "中中"),
        (byte_level(), "RobertaTokenizer", {"add_prefix_space": True}, "a"),
        (byte_level(add_prefix_space=True), "GPT2Tokenizer", {"add_prefix_space": False}, "a"),
        (bert(), "BertTokenizer", {"added_tokens_decoder": {"127": {"content": "xyz", "special": False, "normalized": False}}}, "axyz"),
        (bert(), "PreTrainedTokenizerFast", {"do_lower_case": False}, "A"),
    ],
)
def test_settings_are_applied_as_transformers_applies_them(
    made: Tokenizer, kind: str, settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    if "added_tokens_decoder" in settings:
        rest = {"lstrip": False, "rstrip": False, "single_word": False}
        settings = {"added_tokens_decoder": {str(made.get_vocab_size()): {**settings["added_tokens_decoder"]["127"], **rest}}}
    folder = write(tmp_path, made, kind, **settings)
    used = tokenizer_file(folder)
    assert used.notes  # never silent
    assert next(iter(settings)) in used.notes[0]
    assert used.tokenizer().encode(text).ids == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    if kind != "PreTrainedTokenizerFast":
        assert used.tokenizer().encode(text).ids != made.encode(text).ids
    assert load_tokenizer(str(folder)).backend_tokenizer.to_str() == used.tokenizer().to_str()


def test_an_added_token_that_gets_another_id_is_refused(tmp_path: Path) -> None:
    token = {"content": "xyz", "special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    folder = write(tmp_path, bert(), "BertTokenizer", added_tokens_decoder={"500": token})
    with pytest.raises(InputError, match=r"added_tokens_decoder: the token 'xyz' has the id 500"):
        tokenizer_file(folder)


def test_a_sentencepiece_model_alone_names_the_package_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"\n\x0e\n\x05<unk>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlm-roberta"}))
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "sentencepiece" else known(name, *rest))
    with pytest.raises(InputError, match=r"sentencepiece\.bpe\.model .* `pip install sentencepiece`"):
        tokenizer_file(tmp_path)


def test_the_file_decides_on_end_tokens_as_in_transformers(tmp_path: Path) -> None:
    made = byte_level()
    made.post_processor = processors.ByteLevel()
    folder = write(tmp_path, made, "PreTrainedTokenizerFast", "llama", eos_token="</s>", add_eos_token=True)
    used = tokenizer_file(folder)
    assert "add_eos_token" in used.notes[0]
    assert used.tokenizer().encode("ab").ids == AutoTokenizer.from_pretrained(folder)("ab")["input_ids"]


@pytest.mark.parametrize("lower", [True, False])
def test_sentences_are_lowercased_where_their_model_says_so(lower: bool, tmp_path: Path) -> None:
    folder = write(tmp_path, bert(lowercase=False), "BertTokenizer", do_lower_case=False)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16, "do_lower_case": lower}))
    used, plain = tokenizer_file(folder, embeds=True), tokenizer_file(folder)
    for text in ("Some TEXT", "É"):
        assert used.tokenizer().encode(text).ids == plain.tokenizer().encode(text.lower() if lower else text).ids
    assert any("sentence_bert_config.json" in note for note in used.notes) is lower
    assert plain.unchanged


@pytest.mark.parametrize(
    ("settings", "model_type", "expected"),
    [
        ({"tokenizer_class": "BertTokenizer"}, "bert", True),
        ({"tokenizer_class": "BertTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}, "bert", False),
        ({"tokenizer_class": "DistilBertTokenizer"}, "bert", False),
        ({}, "bert", True),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "token_type_ids"]}, "bert", True),
    ],
)
def test_a_model_reads_the_inputs_that_its_tokenizer_makes(
    settings: dict[str, Any], model_type: str, expected: bool, tmp_path: Path
) -> None:
    folder = write(tmp_path, bert(), model_type=model_type, **settings)
    names = class_inputs(settings, model_type)
    assert names is not None
    assert ("token_type_ids" in names) is expected is ("token_type_ids" in AutoTokenizer.from_pretrained(folder)("a", "b"))
    found = Checkpoint(folder).preprocessor("text-classification", 16, Target(sequence_lengths=[16])).input_names
    assert ("token_type_ids" in found) is expected


@pytest.mark.parametrize(
    ("settings", "model_type", "noted"),
    [
        ({"tokenizer_class": "XLNetTokenizer"}, "xlnet", True),
        ({}, "xlnet", True),
        ({"tokenizer_class": "FunnelTokenizer"}, "funnel", True),
        ({"tokenizer_class": "XLNetTokenizer", "model_input_names": ["input_ids", "attention_mask"]}, "xlnet", False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "xlnet", False),
        ({"tokenizer_class": "BertTokenizer"}, "bert", False),
    ],
)
def test_token_types_that_transformers_leaves_out_are_named(settings: dict[str, Any], model_type: str, noted: bool, tmp_path: Path) -> None:
    """XLNetTokenizer and FunnelTokenizer of Transformers 5.23.0 make none, and made them in Transformers 4.57."""
    folder = write(tmp_path, bert(), model_type=model_type, **settings)
    note = token_types_note(folder, AutoConfig.for_model(model_type))
    assert (note is not None) is noted
    if noted:
        assert (
            "token_type_ids"
            not in tokenization_auto.tokenizer_class_from_name(
                f"{'XLNet' if model_type == 'xlnet' else 'Funnel'}Tokenizer"
            ).model_input_names
        )


def test_an_import_keeps_that_sentences_are_lowercased(tmp_path: Path) -> None:
    source, out = tiny_embedding.folder(tmp_path / "source"), tmp_path / "out"
    settings = json.loads((source / "tokenizer.json").read_text())
    settings["normalizer"] = None
    (source / "tokenizer.json").write_text(json.dumps(settings))
    (source / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16, "do_lower_case": True}))
    out.mkdir()
    import_model(ModelConfig(path=str(source), task="sentence-embedding"), (), 0, out)
    prepared = Checkpoint(out).preprocessor("sentence-embedding", 16, Target(sequence_lengths=[16]))
    plain = Tokenizer.from_file(str(source / "tokenizer.json"))
    assert prepared.encode(["Good FILM"], 0)["input_ids"].tolist() == [plain.encode("good film").ids] != [plain.encode("Good FILM").ids]
    assert json.loads((out / "sentence_bert_config.json").read_text())["do_lower_case"] is False  # its tokenizer.json does it


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_settings_hold_only_numbers_of_json(value: str, tmp_path: Path) -> None:
    """Python's own reader takes these, and the checkpoint could not be written again."""
    (tmp_path / "tokenizer_config.json").write_text(f'{{"model_max_length": [{value}]}}', encoding="utf-8")
    with pytest.raises(InputError, match=rf"tokenizer_config.json: .*{value} is no JSON number"):
        settings_of(tmp_path)
