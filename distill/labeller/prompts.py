"""The prompt file: templates, few-shot examples, and how texts are asked for.

    templates:                                   one or more; the text's place, and at the end the label's
      - "Review: {text}\\nSentiment: {label}"
    examples:                                    optional: labelled texts, put before every text
      - {text: a gripping film, label: positive}
    separator: "\\n\\n"                            between examples; default: an empty line
    chat: false                                  true: every example is a message of the user and the answer; needs a chat template
    system: You label reviews.                   with chat: the first message
    write:                                       optional: how texts are asked for; the label's place, and at the end the text's
      - "A {label} review of a film: {text}"

`{text_pair}` is the place of the second text of a pair. Spaces before `{label}` belong to the label word, as tokenizers join a word with
the space before it. An example has the label's first word. Other braces are left as they are.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, ValidationError

from foundation.core.config import Config
from foundation.core.errors import InputError, nearest
from foundation.core.files import local, read_plain
from foundation.core.shown import shown
from foundation.core.yaml_file import parse_yaml
from foundation.standalone.preprocess import Row

MOST_BYTES = 2**20
PLACE = re.compile(r"\{(\w+)\}")
TEXT, PAIR, LABEL = "text", "text_pair", "label"
Message = Mapping[str, str]


class Example(Config):
    """A labelled text."""

    text: str
    text_pair: str | None = None
    label: str


class PromptFile(Config):
    """The contents of a prompt file."""

    templates: Annotated[tuple[str, ...], Field(min_length=1, max_length=100)]
    examples: Annotated[tuple[Example, ...], Field(max_length=1000)] = ()
    separator: str = "\n\n"
    chat: bool = False
    system: str | None = None
    write: Annotated[tuple[str, ...], Field(max_length=100)] = ()


@dataclass(frozen=True)
class Query:
    """What a model is asked: a text to continue, or messages to answer, and what comes before the answer."""

    prompt: str | tuple[tuple[str, str], ...]
    """A text, or messages as (role, content)."""
    gap: str
    """Spaces between the prompt and a label word; empty for messages."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages of a chat."""
        assert not isinstance(self.prompt, str), "the prompt is a text"
        return [{"role": role, "content": content} for role, content in self.prompt]


def read_prompts(path: str, labels: Mapping[str, Sequence[str]], pairs: bool, key: str) -> PromptFile:
    """Returns the contents of a prompt file.

    Args:
        path: The file.
        labels: Words of each class; examples have labels among these.
        pairs: Whether rows are pairs of texts.
        key: Key path of the file, for messages.

    Raises:
        InputError: The file cannot be read, or a template lacks a place.
    """
    file = local(path, key)
    if not file.is_file():
        raise InputError(key, f"{path} given", "a YAML file with templates is allowed", "give an existing file")
    where = f"{key}: {path}"
    try:
        document: Any = parse_yaml(read_plain(file, MOST_BYTES, where).decode("utf-8"), where)
    except UnicodeDecodeError as error:
        raise InputError(where, "not UTF-8 text", remedy="save it as UTF-8") from error
    try:
        found = PromptFile.model_validate({**document, "examples": _with_texts(document)} if isinstance(document, dict) else document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        allowed = ", ".join(PromptFile.model_fields)
        unknown = first["type"] in ("extra_forbidden", "model_type")
        rule = f"allowed: {allowed}{nearest(place, PromptFile.model_fields)}" if unknown else first["msg"]
        raise InputError(f"{where}{': ' if place else ''}{place}", f"{shown(first['input'], 80)} given", rule) from error
    _check(found, labels, pairs, where)
    return found


def _with_texts(document: Mapping[str, Any]) -> Any:
    """Returns the examples with labels as texts: YAML reads 1 as a number."""
    examples = document.get("examples", ())
    if not isinstance(examples, list):
        return examples
    return [
        {**one, LABEL: str(one[LABEL])} if isinstance(one, dict) and type(one.get(LABEL)) is int else one  # a bool is no label
        for one in examples
    ]


def _check(found: PromptFile, labels: Mapping[str, Sequence[str]], pairs: bool, where: str) -> None:
    texts = (TEXT, PAIR) if pairs else (TEXT,)
    for name, templates, places, last in (
        ("templates", found.templates, (*texts, LABEL), LABEL),
        ("write", found.write, (LABEL, TEXT), TEXT),
    ):
        for number, template in enumerate(templates):
            _check_places(template, places, last, f"{where}: {name}[{number}]")
    for number, example in enumerate(found.examples):
        place = f"{where}: examples[{number}]"
        if example.label not in labels:
            raise InputError(f"{place}.label", f"{shown(example.label)} given", f"the labels are {', '.join(labels)}")
        if (example.text_pair is not None) != pairs:
            raise InputError(f"{place}.text_pair", "missing" if pairs else "given", f"rows are {'pairs' if pairs else 'single texts'}")
    if found.system is not None and not found.chat:
        raise InputError(f"{where}: system", "given without chat: true", remedy="give chat: true, or leave it out")


def _check_places(template: str, places: Sequence[str], last: str, where: str) -> None:
    named = PLACE.findall(template)
    for place in places:
        if named.count(place) != 1:
            count = "no" if place not in named else "more than one"
            raise InputError(where, f"{shown(template, 80)} has {count} {{{place}}}", f"it needs one place for the {place}", "add it")
    if unknown := [name for name in named if name not in places]:
        allowed = ", ".join(f"{{{place}}}" for place in places)
        raise InputError(where, f"{{{unknown[0]}}} given", f"the places are {allowed}{nearest(unknown[0], places)}")
    if not template.endswith(f"{{{last}}}"):
        raise InputError(where, f"{shown(template, 80)} goes on after {{{last}}}", "the answer comes last", f"end it with {{{last}}}")


def _filled(template: str, values: Mapping[str, str]) -> str:
    return PLACE.sub(lambda match: values[match[1]] if match[1] in values else match[0], template)


@dataclass(frozen=True)
class Variant:
    """One way to ask: a template with the few-shot examples in one order."""

    template: str
    examples: tuple[Example, ...]
    file: PromptFile
    words: Mapping[str, Sequence[str]]
    """Words of each class; examples are answered with the first."""

    def query(self, row: Row) -> Query:
        """Returns the query for a text or a pair of texts."""
        assert isinstance(row, str | tuple), type(row)
        texts = (row,) if isinstance(row, str) else row
        head = self.template.removesuffix(f"{{{LABEL}}}")
        asked = _filled(head, dict(zip((TEXT, PAIR), texts, strict=False)))
        shots = [(_filled(head, self._texts(one)), self.words[one.label][0]) for one in self.examples]
        if self.file.chat:
            turns = [("system", self.file.system)] if self.file.system is not None else []
            for question, word in shots:
                turns += [("user", question.strip()), ("assistant", word.strip())]
            return Query((*[(role, str(content)) for role, content in turns], ("user", asked.strip())), "")
        gap = asked[len(asked.rstrip(" ")) :]
        before = "".join(f"{question}{word.strip()}{self.file.separator}" for question, word in shots)
        return Query(before + asked.rstrip(" "), gap)

    def _texts(self, example: Example) -> dict[str, str]:
        return {TEXT: example.text} | ({} if example.text_pair is None else {PAIR: example.text_pair})


def variants(file: PromptFile, words: Mapping[str, Sequence[str]], orders: int, seed: int) -> list[Variant]:
    """Returns every template with every order of the examples: distinct ones, the first in the order of the file.

    Args:
        file: The prompt file.
        words: Words of each class.
        orders: Orders of the examples; fewer if there are not so many.
        seed: Seed of the orders after the first.
    """
    chosen = [file.examples]
    draw = random.Random(seed)
    for _ in range(100 * orders):
        if len(chosen) == orders:
            break
        order = tuple(draw.sample(file.examples, len(file.examples)))
        if order not in chosen:
            chosen.append(order)
    return [Variant(template, order, file, words) for template in file.templates for order in chosen]


def writing_query(template: str, word: str, file: PromptFile) -> Query:
    """Returns the query for a text of a label.

    Args:
        template: One of `write`.
        word: The label's first word.
        file: The prompt file.
    """
    asked = _filled(template.removesuffix(f"{{{TEXT}}}"), {LABEL: word.strip()})
    if file.chat:
        turns = [("system", file.system)] if file.system is not None else []
        return Query((*[(role, str(content)) for role, content in turns], ("user", asked.strip())), "")
    return Query(asked.rstrip(" "), asked[len(asked.rstrip(" ")) :])
