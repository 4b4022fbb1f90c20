"""Whether the model of a document knows every key of a document, and writes no others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from compress.report.model.contents import Contents
from docs.generate import sections
from foundation.artifacts.document import Document


def undocumented(document: dict[str, Any], model: type[Document] = Contents) -> list[str]:
    """Returns the paths of a document that its model does not have; a document that it would write otherwise is an error."""
    read = model.model_validate(document)
    assert read.written() == document
    return sorted(set(unknown(read)))


def unwritten(documents: Sequence[dict[str, Any]], model: type[Document]) -> list[str]:
    """Returns the rows of the reference that none of the documents has; an empty list or map counts as written."""
    written = {path for document in documents for path in paths(document)}
    rows = [f"{section.path}.{key.name}" if section.path else key.name for section in sections(model) for key in section.keys]
    return [row for row in rows if not any(_pattern(row).fullmatch(path) for path in written)]


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Yields the path of every value, and of the maps and lists around it."""
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for item in value:
            yield from paths(item, f"{path}[]")


def unknown(document: Document, path: str = "") -> Iterator[str]:
    """Yields the keys of a document that its model does not have."""
    yield from (f"{path}{key}" for key in document.model_extra or ())
    for name, field in type(document).model_fields.items():
        yield from _unknown(getattr(document, name), f"{path}{field.alias or name}")


def _unknown(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Document):
        yield from unknown(value, f"{path}.")
    elif isinstance(value, tuple):
        for item in value:
            yield from _unknown(item, f"{path}[]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _unknown(item, f"{path}.{key}")


def _pattern(row: str) -> re.Pattern[str]:
    """Returns the regular expression of a row: a word in capitals is any name, and an empty list has no entries."""
    text = re.sub(r"(?<=\\\.)[A-Z]+(?=\\\.|$)", ".+", re.escape(row))
    return re.compile(re.sub(r"(\\\[\\\]|\\\.\.\+)$", "", text))
