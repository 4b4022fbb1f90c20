"""The one tokenizer of a model folder: which tokenizer.json training, windows, engines and server all read.

Where the folder has tokenizer.json, that file decides: normalizer, pre-tokenizer, post-processor and vocabulary. Transformers 5 builds many
classes (BERT, RoBERTa, T5, ...) anew only from the vocabulary, with a normalizer and a pre-tokenizer of its own, so that `AutoTokenizer`
may encode otherwise than the file; `unlike_class` compares the two. Where the folder has none, its class builds the tokenizer.

tokenizer_config.json may say more than the file. Its `do_lower_case`, `strip_accents`, `tokenize_chinese_chars`, `add_prefix_space` and
`added_tokens_decoder` are written into the file that the run uses, if the class in Transformers reads them, which the library is asked for.
The others are named in `TokenizerFile.notes`: Transformers ignores `add_bos_token` and `add_eos_token` next to tokenizer.json.

Sources: `AutoTokenizer.from_pretrained` and `TokenizersBackend.convert_to_native_format` of Transformers 5.23.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from foundation.artifacts.artifact import write_json
from foundation.artifacts.safetensors import MOST_JSON, parse_json
from foundation.core.errors import InputError
from foundation.core.files import read_plain
from foundation.core.shown import reason, shown
from foundation.core.stamps import Stamps
from foundation.models.files import state_of
from foundation.models.library import one_line, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

FILE, SETTINGS, SENTENCES = "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json"
NEW_CLASS, OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"
"""Class name of a tokenizer.json tokenizer in Transformers 5, and the name that Transformers 4 knows too."""
MOST_TOKENIZER = 2**29
"""Most bytes of a tokenizer.json that is read."""
Part = dict[str, Any]
"""A part of tokenizer.json, such as its normalizer, or the whole file."""
NORMALIZERS = {"do_lower_case": ("lowercase", "Lowercase"), "strip_accents": ("strip_accents", "StripAccents")}
"""Keys of tokenizer_config.json, with the field of a BertNormalizer and the normalizer of a chain that they switch."""
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = "extra_special_tokens"
PROBES = (
    "The café… costs ½, \ufb01ne: “it's”  12 345 €!",
    " leading and trailing  spaces \t and\nlines \n",
    "中文字符 テスト Ärger NAÏVE don't won't A.B-C",
    "x",
)


@dataclass(frozen=True)
class TokenizerFile:
    """The tokenizer.json that a run uses for a model folder."""

    text: str
    """Contents."""
    notes: tuple[str, ...]
    """Parts of the folder's tokenizer.json that are not used, and settings that nothing reads; one line each."""
    unchanged: bool
    """Whether it is the folder's own file, byte for byte."""

    def tokenizer(self) -> Tokenizer:
        """Returns a new tokenizer, without truncation and padding."""
        made = Tokenizer.from_str(self.text)
        made.no_truncation()
        made.no_padding()
        return made


def tokenizer_file(folder: Path, *, embeds: bool = False) -> TokenizerFile:
    """Returns the tokenizer.json that a run uses.

    Args:
        folder: A folder with a tokenizer.
        embeds: Whether the model makes vectors of sentences: sentence_bert_config.json then says whether texts are lowercased.

    Raises:
        InputError: There is no readable tokenizer, or a setting of tokenizer_config.json cannot be applied.
    """
    return _tokenizer_file(folder, embeds, state_of(folder))


@lru_cache(maxsize=8)
def _tokenizer_file(folder: Path, embeds: bool, state: Stamps) -> TokenizerFile:
    del state  # part of the key: a file that is written anew is read anew
    settings, notes = settings_of(folder), list[str]()
    if (folder / FILE).is_file():
        text, tokenizer = _checked(folder, read_plain(folder / FILE, MOST_TOKENIZER))
        own = tokenizer.to_str()  # every part with its type and all its fields, which a file may leave out
        parts = json.loads(own)
        for name in (*NORMALIZERS, "tokenize_chinese_chars", "add_prefix_space"):
            notes += _applied(folder, parts, name, settings)
        notes += _added(folder, parts, settings)
        notes += _ends(folder, text, settings)
    else:
        made = from_class(folder)
        parts, text, own = json.loads(made.backend_tokenizer.to_str()), "", ""
        notes.append(f"{folder.name} has no {FILE}: {type(made).__name__} of Transformers makes it from the vocabulary")
    if embeds and _sentences_are_lowercased(folder):
        parts["normalizer"] = _chain([{"type": "Lowercase"}, *_links(parts["normalizer"])], "normalizers")
        notes.append(f"{SENTENCES}: do_lower_case: applied to {FILE}")
    if own and json.loads(own) == parts:
        return TokenizerFile(text, tuple(notes), unchanged=True)
    changed, _ = _checked(folder, json.dumps(parts, ensure_ascii=False, indent=2).encode())
    return TokenizerFile(changed, tuple(notes), unchanged=False)


def _checked(folder: Path, data: bytes) -> tuple[str, Tokenizer]:
    """Returns the contents of a tokenizer.json, and what the library reads of it."""
    try:
        text = data.decode("utf-8")
        made = Tokenizer.from_str(text)
    except Exception as error:  # the binding raises bare Exception
        raise InputError(f"{folder / FILE}", f"not a tokenizer ({reason(error)})", remedy="save it again with save_pretrained") from error
    for entry in json.loads(text).get("added_tokens", ()):
        if made.token_to_id(entry["content"]) != entry["id"]:
            said = f"the token {shown(entry['content'])} should have the id {entry['id']}, and gets {made.token_to_id(entry['content'])}"
            raise InputError(f"{folder}", f"{said}", remedy="save the tokenizer again with save_pretrained")
    return text, made


def settings_of(folder: Path) -> dict[str, object]:
    """Returns tokenizer_config.json; empty where there is none.

    Raises:
        InputError: It cannot be read.
    """
    return _json(folder / SETTINGS)


def _json(file: Path) -> dict[str, object]:
    if not file.is_file():
        return {}
    try:
        value = parse_json(read_plain(file, MOST_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}", f"cannot be read ({reason(error)})", remedy="save the tokenizer again with save_pretrained") from error
    if not isinstance(value, dict):
        raise InputError(f"{file}", f"a JSON {type(value).__name__}", "a JSON object is allowed")
    return value


def _sentences_are_lowercased(folder: Path) -> bool:
    return _json(folder / SENTENCES).get("do_lower_case") is True


def from_class(folder: Path, **settings: Any) -> PreTrainedTokenizerBase:
    """Returns the tokenizer that the class named in the folder makes of it in Transformers.

    Raises:
        InputError: It cannot, or a package is missing that it needs.
    """
    from transformers import AutoTokenizer

    models = sorted(file.name for file in folder.glob("*.model") if file.name != "tiktoken.model")
    if models and not (folder / FILE).is_file() and importlib.util.find_spec("sentencepiece") is None:
        raise InputError(
            "tokenizer",
            f"{folder} has {models[0]} and no {FILE}",
            f"the package sentencepiece reads it: `pip install sentencepiece`, or save {FILE} next to the model",
        )
    try:
        with quiet():
            made = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **settings)
    except Exception as error:  # the tokenizers library raises plain Exception
        remedy = f"save a fast tokenizer there with save_pretrained, which writes {FILE}"
        raise InputError("tokenizer", f"{folder} has no readable tokenizer ({one_line(error)})", remedy=remedy) from error
    if not made.is_fast:
        raise InputError("tokenizer", f"{folder} has no fast tokenizer", remedy=f"give a folder with {FILE}")
    return made


def unlike_class(folder: Path, used: TokenizerFile) -> str | None:
    """Returns in one line that the class in Transformers encodes some texts otherwise than the file; None where it does not."""
    return _unlike_class(folder, used, state_of(folder))


@lru_cache(maxsize=8)
def _unlike_class(folder: Path, used: TokenizerFile, state: Stamps) -> str | None:
    del state  # part of the key
    try:
        made = from_class(folder)
    except InputError as error:
        return f"{FILE} is used, as everywhere in this run; AutoTokenizer does not read the folder ({error.problems[0]})"
    own, theirs = used.tokenizer(), made.backend_tokenizer
    theirs.no_truncation()
    theirs.no_padding()
    words = sorted(own.get_vocab(), key=lambda word: own.get_vocab()[word])[:200] if own.get_vocab_size() < 1000 else []
    for probe in (*PROBES, " ".join(words), " ".join(words).title()):
        if _ids(own, probe) != _ids(theirs, probe):
            name = type(made).__name__
            return (
                f"{FILE} is used, and {name} of Transformers encodes some texts otherwise, such as {shown(probe)}: "
                "a model that was trained with that class may answer worse here"
            )
    return None


def _ids(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Returns the ids of a text; None where the tokenizer has none, such as one of words without a token for unknown ones."""
    try:
        ids: list[int] = tokenizer.encode(text).ids
    except Exception:  # the binding raises bare Exception
        return None
    return ids


def write_tokenizer(folder: Path, out: Path, changes: Mapping[str, object], *, embeds: bool = False) -> Iterator[str]:
    """Writes the tokenizer of a folder into a checkpoint, to which its files were copied; yields lines about what is not the folder's own.

    Where the class in Transformers would not read the checkpoint's tokenizer.json as it is, tokenizer_config.json names the generic class:
    then Transformers, and every server that is built on it, encodes as this run does.

    Args:
        folder: A folder with a tokenizer.
        out: The checkpoint.
        changes: Keys of tokenizer_config.json that the checkpoint gets.
        embeds: As of `tokenizer_file`.

    Raises:
        InputError: As of `tokenizer_file`.
    """
    used, settings = tokenizer_file(folder, embeds=embeds), settings_of(folder)
    differs = unlike_class(folder, used)
    yield from used.notes
    if differs is not None:
        yield differs
    if not used.unchanged:
        (out / FILE).write_text(used.text, encoding="utf-8")
    if not used.unchanged or differs is not None:
        inputs = class_inputs(settings, str(_json(folder / "config.json").get("model_type", "")))
        told = {} if inputs is None else {"model_input_names": list(inputs)}
        changes = {**names_of(folder, used.tokenizer()), **told, "tokenizer_class": OLD_CLASS, **changes}
    if any(settings.get(name) != value for name, value in changes.items()):
        write_json(out / SETTINGS, {**settings, **changes})


def _links(part: Part | None) -> list[Part]:
    """Returns the normalizers, or pre-tokenizers, of a chain in order."""
    if part is None:
        return []
    inner = part.get("normalizers", part.get("pretokenizers")) if part.get("type") == "Sequence" else None
    return [link for one in inner for link in _links(one)] if inner else [part]


def _chain(links: list[Part], key: str) -> Part | None:
    return None if not links else links[0] if len(links) == 1 else {"type": "Sequence", key: links}


def _applied(folder: Path, parts: Part, name: str, settings: Mapping[str, object]) -> Iterator[str]:
    """Writes a setting of tokenizer_config.json into the parts of a tokenizer.json; yields what was done."""
    value, present = settings.get(name), _present(parts, name)
    if name == "strip_accents" and name in settings and value is None:  # as for lower case
        value = _present(parts, "do_lower_case")
    if not isinstance(value, bool) or present is None or present == value:
        return
    told = f"{SETTINGS}: {name}: {str(value).lower()} is not what {FILE} does"
    if not _reads(folder, name, value):
        yield f"{told}; Transformers ignores it next to {FILE}, and so does this run"
        return
    _set(parts, name, value)
    yield f"{told}; it is applied, as in Transformers"


def _present(parts: Part, name: str) -> bool | None:
    """Returns a setting of a tokenizer.json; None where it has none."""
    links = _links(parts.get("normalizer"))
    bert = next((link for link in links if link["type"] == "BertNormalizer"), None)
    if name in NORMALIZERS:
        field, kind = NORMALIZERS[name]
        if bert is None:
            return any(link["type"] == kind for link in links)
        return bool(bert["lowercase"] if bert[field] is None else bert[field])
    if name == "tokenize_chinese_chars" and bert is not None:
        return bool(bert["handle_chinese_chars"])
    if name == "add_prefix_space":
        for link in _links(parts.get("pre_tokenizer")):
            if link["type"] == "ByteLevel":
                return bool(link["add_prefix_space"])
            if link["type"] == "Metaspace" and "prepend_scheme" in link:
                return bool(link["prepend_scheme"] != "never")
    return None


def _set(parts: Part, name: str, value: bool) -> None:
    if name == "add_prefix_space":
        link = next(link for link in _links(parts["pre_tokenizer"]) if link["type"] in ("ByteLevel", "Metaspace"))
        link.update({"add_prefix_space": value} if link["type"] == "ByteLevel" else {"prepend_scheme": "always" if value else "never"})
        return
    links = _links(parts["normalizer"])
    bert = next((link for link in links if link["type"] == "BertNormalizer"), None)
    field, kind = NORMALIZERS.get(name, ("handle_chinese_chars", ""))
    if bert is not None:
        bert[field] = value
    else:
        links = [link for link in links if link["type"] != kind]
        parts["normalizer"] = _chain([{"type": kind}, *links] if value else links, "normalizers")


def _reads(folder: Path, name: str, value: bool) -> bool:
    """Whether the folder's class in Transformers reads a setting: the tokenizers of both values are compared."""
    made = [json.loads(from_class(folder, **{name: one}).backend_tokenizer.to_str()) for one in (value, not value)]
    return any(made[0][part] != made[1][part] for part in ("normalizer", "pre_tokenizer"))


def _added(folder: Path, parts: Part, settings: Mapping[str, object]) -> Iterator[str]:
    """Writes the tokens of `added_tokens_decoder` into the parts as Transformers has them; yields what was done."""
    given = settings.get("added_tokens_decoder")
    if not isinstance(given, dict) or not given:
        return
    known = {entry["id"]: entry for entry in parts.get("added_tokens", ())}
    fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    wrong = [key for key, value in given.items() if any(known.get(int(key), {}).get(name) != value.get(name) for name in fields)]
    if not wrong:
        return
    theirs = from_class(folder).backend_tokenizer.get_added_tokens_decoder()
    lost = [key for key in wrong if int(key) not in theirs]
    if lost:
        token = f"the token {shown(content_of(given[lost[0]]))} has the id {lost[0]}"
        raise InputError(
            f"{folder / SETTINGS}", f"added_tokens_decoder: {token}, which Transformers does not give it", remedy="save the tokenizer again"
        )
    changed: list[str] = []
    for number in map(int, wrong):
        entry = {"id": number, **{name: getattr(theirs[number], name) for name in fields}}
        if known.get(number) != entry:
            known[number] = entry
            changed.append(str(entry["content"]))
    if changed:
        parts["added_tokens"] = [known[number] for number in sorted(known)]
        yield f"{SETTINGS}: added_tokens_decoder: {len(changed)} tokens, such as {shown(changed[0])}, differ in {FILE}; they are applied"


def _ends(folder: Path, text: str, settings: Mapping[str, object]) -> Iterator[str]:
    """Yields which of add_bos_token and add_eos_token the file does not do."""
    ids: list[int] | None = None
    for name, place in (("bos", 0), ("eos", -1)):
        value, token = settings.get(f"add_{name}_token"), content_of(settings.get(f"{name}_token"))
        if not isinstance(value, bool) or token is None:
            continue
        made = Tokenizer.from_str(text)
        ids = made.encode(PROBES[-1]).ids if ids is None else ids
        if (bool(ids) and ids[place] == made.token_to_id(token)) is not value:
            yield f"{SETTINGS}: add_{name}_token: {str(value).lower()} is not what {FILE} does, which decides in Transformers and here"


def token_types_note(folder: Path, config: PreTrainedConfig) -> str | None:
    """Returns in one line that a run passes token types which Transformers 5 leaves out (XLNet, Funnel); None where both do the same.

    Models of these types were trained with them in Transformers 4. The generic class changed in the same way, and may belong to any model.

    Args:
        folder: Folder with the tokenizer.
        config: Transformers config of a text model.
    """
    settings = settings_of(folder)
    name = settings.get("tokenizer_class")
    if not has_token_types(config) or class_inputs(settings, config.model_type) is not None or name in (NEW_CLASS, OLD_CLASS):
        return None
    return (
        f"{config.model_type} gets token_type_ids as {FILE} gives them, and as Transformers 4 did; Transformers 5 passes none, and may "
        f'answer otherwise: "model_input_names": ["input_ids", "attention_mask"] in {SETTINGS} leaves them out'
    )


def class_inputs(settings: Mapping[str, object], model_type: str) -> tuple[str, ...] | None:
    """Returns the inputs that the folder's tokenizer makes of a text in Transformers; None where that is left to the model.

    `model_input_names` of tokenizer_config.json says so, else the class. The generic class is left out, and classes that take its inputs
    over (XLNet): it made token_type_ids in Transformers 4 and makes none in Transformers 5.

    Args:
        settings: tokenizer_config.json.
        model_type: Model type of config.json, which determines the class where tokenizer_config.json names none.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    given = settings.get("model_input_names")
    if isinstance(given, list):
        return tuple(map(str, given))
    named = settings.get("tokenizer_class")
    name = named if named else TOKENIZER_MAPPING_NAMES.get(model_type)
    found = tokenizer_class_from_name(name) if isinstance(name, str) else None
    names = getattr(found, "model_input_names", None)
    return None if names is None or names is PreTrainedTokenizerFast.model_input_names else tuple(names)


def has_token_types(config: PreTrainedConfig) -> bool:
    """Whether a text model distinguishes the texts of a pair by token_type_ids.

    Args:
        config: Its Transformers config.
    """
    # XLNet adds relative types to its scores, and Funnel counts them without a setting.
    return (getattr(config, "type_vocab_size", None) or 0) > 1 or config.model_type in ("xlnet", "funnel")


def names_of(folder: Path, used: Tokenizer) -> dict[str, object]:
    """Returns the special tokens of a folder by their keys, as far as the tokenizer has them; `extra_special_tokens` is a list.

    The class in Transformers names them, or tokenizer_config.json where that class does not read the folder.
    """
    known, extra = _names(folder, state_of(folder))
    names: dict[str, object] = {name: token for name, token in known if used.token_to_id(token) is not None}
    extra = tuple(token for token in extra if used.token_to_id(token) is not None)
    return {**names, EXTRA: list(extra)} if extra else names


@lru_cache(maxsize=8)
def _names(folder: Path, state: Stamps) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    del state  # part of the key
    try:
        made = from_class(folder)
        known: dict[str, object] = {name: getattr(made, name, None) for name in (*SPECIAL, EXTRA)}
    except InputError:  # tokenizer.json is there and decides: only names are missing
        known = {**_json(folder / "special_tokens_map.json"), **settings_of(folder)}
        named = known.get(EXTRA)
        known[EXTRA] = named if named else known.get("additional_special_tokens")
    contents = [(name, content_of(known.get(name))) for name in SPECIAL]
    given = known[EXTRA]
    extra = tuple(token for token in map(content_of, given if isinstance(given, list | tuple) else ()) if token is not None)
    return tuple((name, token) for name, token in contents if token is not None), extra


def content_of(token: object) -> str | None:
    """Returns a token of tokenizer_config.json, which is a text or a map with its content; None where there is none."""
    token = token.get("content") if isinstance(token, dict) else getattr(token, "content", token)
    return token if isinstance(token, str) else None
