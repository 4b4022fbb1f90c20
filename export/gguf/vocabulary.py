"""Tokenizers in GGUF: a vocabulary, and the name of the rules by which llama.cpp splits texts.

    tokenizer.json                                            tokenizer.ggml.model    tokenizer.ggml.pre
    byte-level BPE, the regular expression of GPT-2           gpt2                    gpt-2
    the same after single digits (SmolLM)                     gpt2                    smollm
    the regular expression of Llama 3, digits in threes       gpt2                    llama-bpe; smaug-bpe without ignore_merges
    the regular expression of Qwen2, single digits            gpt2                    qwen2
    WordPiece in lower case (BERT, uncased)                   bert

llama.cpp holds these rules in its code: a file only names them. A tokenizer whose rules are not exactly those of a name is refused. Under
an unknown name llama.cpp would apply rules of its own, and every figure of the model would be another one.

A word in llama.cpp begins with the letter U+2581, and a piece that goes on has no mark: `##ing` is written as `ing`, and `play` with that
letter in front. Words of over 100 letters are [UNK] in WordPiece and pieces in llama.cpp. It applies no Unicode normal form: what Qwen2
makes NFC stays as it is. Spaces around special tokens within a text stay (`lstrip`, `rstrip`).

llama.cpp ends an answer at every token of `ENDS` too, whatever the model says, because of their names.

Sources: llama-vocab.cpp of llama.cpp, and `get_vocab_base_pre` and `BertModel.set_vocab` of its converter.

Left out: SentencePiece (BPE with byte fallback, Unigram), cased WordPiece.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from foundation.core.answer_tokens import AnswerTokens
from foundation.core.errors import InputError
from foundation.core.shown import shown
from foundation.models.generation import settings_of
from foundation.models.inputs.tokenizer import load_tokenizer
from foundation.models.inputs.tokenizer_file import FILE, tokenizer_file

if TYPE_CHECKING:
    from gguf import GGUFWriter

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""`TokenType` of GGUF: of the vocabulary; special; added, not special; a row without a token."""
GPT2 = ("ByteLevel", False, True)
BYTES = ("ByteLevel", False, False)
_ENDINGS, _WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = (("Split", f"{_ENDINGS}{digits}{_WORDS}", "Isolated", False) for digits in (r"\p{N}{1,3}", r"\p{N}"))
RULES: Mapping[tuple[tuple[object, ...], bool], str] = {
    ((GPT2,), False): "gpt-2",
    ((("Digits", True), GPT2), False): "smollm",
    ((LLAMA3, BYTES), True): "llama-bpe",
    ((LLAMA3, BYTES), False): "smaug-bpe",
    ((QWEN2, BYTES), False): "qwen2",
}
"""Names of rules, by the pre-tokenizer and by whether a word that is a token is taken as a whole (`ignore_merges`)."""
ENDS = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>")
    + ("<|end_of_text|>", "<end_of_utterance>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "<|fim_repo|>", "<|repo_name|>")
    + ("<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>")
)
"""Tokens at which llama.cpp ends an answer because of their names (llama-vocab.cpp)."""
PHANTOM, PIECE = "\u2581", "##"
BERT_NORMALIZER: Mapping[str, tuple[object, ...]] = {
    "type": ("BertNormalizer",),
    "clean_text": (True,),
    "handle_chinese_chars": (True,),
    "lowercase": (True,),
    "strip_accents": (None, True),
}
"""Values with which the normalizer of BERT does what llama.cpp does."""
ROLES = ("eos", "eot", "eom")
"""Names that GGUF has for tokens that end an answer."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as GGUF holds it."""

    model: str
    """gpt2 or bert."""
    rules: str
    """Name of the pre-tokenizer."""
    tokens: tuple[str, ...]
    """A token for each row of the embeddings."""
    types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    """Pairs, with a space between them."""
    ids: Mapping[str, int] = field(default_factory=dict)
    """Special tokens by role: bos, eos, eot, eom, unk, sep, pad, mask."""
    begins: bool = False
    """Whether every text begins with bos."""
    ends: bool = False
    """Whether every text ends with eos, or with sep for bert."""
    chat_template: str = ""
    remarks: tuple[str, ...] = ()
    """How llama.cpp reads texts otherwise, a sentence each."""

    def add_to(self, writer: GGUFWriter) -> None:
        """Adds the tokenizer to a file."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.rules)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.merges:
            writer.add_token_merges(self.merges)
        for role, token in self.ids.items():
            getattr(writer, f"add_{role}_token_id")(token)
        writer.add_add_bos_token(self.begins)
        if self.model != "bert":  # which has a sep in place of it
            writer.add_add_eos_token(self.ends)
        if self.chat_template:
            writer.add_chat_template(self.chat_template)


def vocabulary(folder: Path, rows: int, embeds: bool) -> Vocabulary:
    """Returns the tokenizer of a checkpoint.

    Args:
        folder: The checkpoint.
        rows: Rows of its embeddings: tokens and what is unused.
        embeds: Whether the model makes vectors of texts.

    Raises:
        InputError: llama.cpp has no such rules, or the tokenizer has more tokens than the model.
    """
    file = tokenizer_file(folder, embeds=embeds)
    parts, tokenizer = json.loads(file.text), file.tokenizer()
    known = tokenizer.get_vocab(with_added_tokens=True)
    if known and max(known.values()) >= rows:
        raise InputError(f"{folder / FILE}", f"{max(known.values()) + 1} tokens", f"the embeddings have {rows} rows")
    kind = parts["model"]["type"]
    if kind not in ("BPE", "WordPiece"):
        raise _refused(folder, f"a tokenizer of the kind {kind}", "byte-level BPE and WordPiece in lower case are written")
    return _bpe(folder, parts, tokenizer, rows) if kind == "BPE" else _word_piece(folder, parts, tokenizer, rows)


def _refused(folder: Path, given: str, allowed: str) -> InputError:
    return InputError(f"{folder / FILE}", given, allowed, "publish the model in another format")


def _bpe(folder: Path, parts: Mapping[str, Any], tokenizer: Tokenizer, rows: int) -> Vocabulary:
    model = parts["model"]
    if model.get("byte_fallback") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        does = "llama.cpp merges by other rules than tokenizer.json; byte-level BPE is written"
        raise _refused(folder, "BPE of SentencePiece's kind", does)
    links = tuple(_rule(link) for link in _links(parts.get("pre_tokenizer"), "pretokenizers"))
    rules, normal = RULES.get((links, bool(model.get("ignore_merges")))), _links(parts.get("normalizer"), "normalizers")
    if rules is None:
        raise _refused(folder, f"the pre-tokenizer {shown(parts.get('pre_tokenizer'))}", "llama.cpp knows no name of exactly these rules")
    forms = [link["type"] for link in normal]
    if forms not in ([], ["NFC"]):
        raise _refused(folder, f"the normalizer {', '.join(forms)}", "llama.cpp applies none")
    remarks = ["llama.cpp does not bring texts into the normal form NFC, as the tokenizer does."] if forms else []
    before, after = _around(folder, tokenizer)
    ids, more = _decoder_ids(folder, tokenizer, before, after)
    tokens, types = _table(tokenizer, parts, rows)
    others = sorted(token for token in ENDS & set(tokens) if tokens.index(token) not in ids.values())
    if others:
        more = (*more, f"llama.cpp ends answers at {', '.join(others)} too, because of these names.")
    template = load_tokenizer(str(folder)).chat_template
    return Vocabulary(
        "gpt2",
        rules,
        tokens,
        types,
        tuple(pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]),
        ids,
        bool(before),
        bool(after),
        template if isinstance(template, str) else "",
        (*remarks, *more),
    )


def _decoder_ids(folder: Path, tokenizer: Tokenizer, before: list[int], after: list[int]) -> tuple[dict[str, int], tuple[str, ...]]:
    """Returns the special tokens of a decoder by role, and remarks."""
    loaded = load_tokenizer(str(folder))
    named = [] if loaded.eos_token_id is None else [int(loaded.eos_token_id)]
    ends = list(dict.fromkeys([*after, *named, *AnswerTokens.of(settings_of(folder)).ends]))
    ids = dict(zip(ROLES, ends, strict=False))
    first = before[0] if before else loaded.bos_token_id
    ids |= {} if first is None else {"bos": int(first)}
    ids |= {} if loaded.pad_token_id is None else {"pad": int(loaded.pad_token_id)}
    lost = [str(tokenizer.id_to_token(token)) for token in ends[len(ROLES) :]]
    remark = f"Answers of the run end at {', '.join(lost)} too, for which GGUF has no name." if lost else ""
    return ids, (remark,) if remark else ()


def _word_piece(folder: Path, parts: Mapping[str, Any], tokenizer: Tokenizer, rows: int) -> Vocabulary:
    model, normalizer, splits = parts["model"], parts.get("normalizer") or {}, parts.get("pre_tokenizer") or {}
    if any(normalizer.get(key) not in allowed for key, allowed in BERT_NORMALIZER.items()):
        does = "llama.cpp lowercases texts, strips accents and separates Chinese letters"
        raise _refused(folder, f"the normalizer {shown(normalizer)}", does)
    if splits.get("type") != "BertPreTokenizer" or model.get("continuing_subword_prefix") != PIECE:
        raise _refused(folder, f"the pre-tokenizer {shown(splits)}", "llama.cpp splits words as BERT does, into pieces with ##")
    before, after = _around(folder, tokenizer)
    if not before or not after:
        raise _refused(folder, "texts without [CLS] and [SEP]", "llama.cpp puts them around every text")
    tokens, types = _table(tokenizer, parts, rows)
    tokens = tuple(_phantom(token, kind) for token, kind in zip(tokens, types, strict=True))
    if len(set(tokens)) < len(tokens):
        twice = next(token for place, token in enumerate(tokens) if token in tokens[:place])
        raise _refused(folder, f"two tokens are {shown(twice)} to llama.cpp", "each may stand once")
    loaded = load_tokenizer(str(folder))
    unknown = tokenizer.token_to_id(model["unk_token"])
    ids = {"bos": before[0], "sep": after[0]} | ({} if unknown is None else {"unk": unknown})
    others = {"pad": loaded.pad_token_id, "mask": loaded.mask_token_id}
    ids |= {role: int(token) for role, token in others.items() if token is not None}
    return Vocabulary("bert", "default", tokens, types, (), ids, begins=True, ends=True)


def _phantom(token: str, kind: int) -> str:
    """Returns a word piece as llama.cpp has it."""
    if kind in (CONTROL, UNUSED):
        return token
    return token.removeprefix(PIECE) if token.startswith(PIECE) else PHANTOM + token


def _table(tokenizer: Tokenizer, parts: Mapping[str, Any], rows: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns the tokens and their types by id."""
    added = {entry["id"]: CONTROL if entry["special"] else USER_DEFINED for entry in parts.get("added_tokens", ())}
    texts: list[str | None] = [tokenizer.id_to_token(place) for place in range(rows)]
    tokens = tuple(f"[PAD{place}]" if text is None else text for place, text in enumerate(texts))
    types = tuple(UNUSED if text is None else added.get(place, NORMAL) for place, text in enumerate(texts))
    return tokens, types


def _around(folder: Path, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the tokens that stand before and after every text: at most one each."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    start = next((place for place in range(len(whole)) if whole[place : place + len(plain)] == plain), None)
    if start is None:
        raise _refused(folder, "a post-processor that changes tokens", "llama.cpp puts one token before and one after a text")
    before, after = whole[:start], whole[start + len(plain) :]
    if len(before) > 1 or len(after) > 1:
        raise _refused(folder, f"{len(before)} tokens before and {len(after)} after every text", "llama.cpp puts one each at most")
    return before, after


def _links(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Returns the parts of a chain, in order."""
    if part is None:
        return []
    return [link for one in part[key] for link in _links(one, key)] if part["type"] == "Sequence" else [part]


def _rule(link: Mapping[str, Any]) -> tuple[object, ...]:
    """Returns what decides how a pre-tokenizer splits texts."""
    match link["type"]:
        case "ByteLevel":
            return ("ByteLevel", link.get("add_prefix_space", True), link.get("use_regex", True))
        case "Digits":
            return ("Digits", link["individual_digits"])
        case "Split":
            return ("Split", link["pattern"].get("Regex"), link["behavior"], link["invert"])
    return (link["type"],)
