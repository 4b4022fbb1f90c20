"""Questions with their answers: files of SQuAD 1.1 and 2.0, and rows of tables.

    {"data": [{"paragraphs": [{"context": TEXT, "qas": [{"question": TEXT, "answers": [{"text": TEXT, "answer_start": 0}]}]}]}]}

Tables have a row for each question: question, context, and the answers as on the Hub, {"text": [TEXT, ...], "answer_start": [0, ...]}, or
as a list as above. Each answer occurs in the context at the character `answer_start`; a question without one has none. White space before
a question is dropped, as the example of Transformers does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from foundation.core.errors import InputError
from foundation.core.shown import is_unicode, shown
from foundation.data.tables import Cells, Table, names_of, opened, parse_json, pick, suffix, text_lines

_ALLOWED = 'a map {"text": [...], "answer_start": [...]}, or a list of {"text": ..., "answer_start": ...}, is allowed'


class Gold(NamedTuple):
    """A true answer."""

    text: str
    start: int
    """Its first character in the context."""


def is_json(path: Path) -> bool:
    """Whether a file is one JSON value, which may be in the form of SQuAD."""
    return suffix(path) == ".json"


def read_squad(table: Table) -> Iterator[tuple[int, Cells]]:
    """Yields for each question of a JSON file, counted from 1, question, context and answers; from a list of rows the wanted columns.

    Raises:
        InputError: The file cannot be read, or has another form; the message gives the question.
    """
    with opened(table) as stream:
        whole = parse_json(str(table.path), "\n".join(text_lines(table, stream)))
    if isinstance(whole, list):
        names = names_of(table)
        yield from ((number, pick(table, number, row, names)) for number, row in enumerate(whole, 1))
        return
    number = 0
    for article in _list(whole, "data", str(table.path)):
        for paragraph in _list(article, "paragraphs", f"{table.path}: an article"):
            where = f"{table.path}: the paragraph behind question {number}"
            for asked in _list(paragraph, "qas", where):
                number += 1
                yield number, (_entry(asked, "question", table, number), paragraph.get("context"), _entry(asked, "answers", table, number))


def _list(value: object, key: str, where: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise InputError(where, f"no list {key!r}", "JSON in the form of SQuAD (data, paragraphs, qas), or a list of rows, is allowed")
    return found


def _entry(entry: object, key: str, table: Table, number: int) -> object:
    if not isinstance(entry, dict) or key not in entry:
        raise InputError(f"{table.path} question {number}", f"no {key!r}", "a question of SQuAD has question and answers")
    return entry[key]


def question_of(cells: Cells, place: str) -> tuple[tuple[str, str], tuple[Gold, ...]]:
    """Returns question and context, and the true answers.

    Args:
        cells: Question, context and answers.
        place: File and number, for messages.

    Raises:
        InputError: A cell has another form, or an answer does not occur in the context at its `answer_start`.
    """
    question, context, answers = cells
    for name, text in (("question", question), ("context", context)):
        if not isinstance(text, str) or not text.strip() or not is_unicode(text):
            raise InputError(place, f"{shown(text, 40)} given as {name}", "Unicode text with words is allowed")
    golds = tuple(_gold(text, start, context, place) for text, start in _pairs(answers, place))
    return (question.lstrip(), context), golds


def _pairs(answers: object, place: str) -> list[tuple[object, object]]:
    """Returns text and place of each answer of a cell."""
    if isinstance(answers, dict):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if isinstance(texts, list | tuple) and isinstance(starts, list | tuple) and len(texts) == len(starts):
            return list(zip(texts, starts, strict=True))
    elif isinstance(answers, list | tuple) and all(isinstance(one, dict) for one in answers):
        return [(one.get("text"), one.get("answer_start")) for one in answers]
    raise InputError(place, f"{shown(answers, 60)} given as answers", _ALLOWED)


def _gold(text: object, start: object, context: str, place: str) -> Gold:
    if not isinstance(text, str) or isinstance(start, bool) or not isinstance(start, int) or start < 0 or not text:
        raise InputError(place, f"{shown(text, 40)} at {shown(start, 20)} given as an answer", "a text and its first character are allowed")
    if context[start : start + len(text)] != text:
        found = shown(context[start : start + len(text)], 40)
        raise InputError(
            place, f"the answer {shown(text, 40)} is not in the context at character {start}, where {found} stands", remedy="correct it"
        )
    return Gold(text, start)
