"""Whether the reference of report.json knows every key of a report, and that of search.json every key of a search, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from compress.report.keys import KEYS, Key

_NAMES = {**dict.fromkeys(("BACKEND", "METRIC", "PACKAGE", "OBJECTIVE", "RUNG", "GOAL"), r"[^.\[\]]+"), "*": r".*"}


def undocumented(report: dict[str, Any], keys: Sequence[Key] = KEYS) -> list[str]:
    """Returns the paths of a report that no row of the reference names."""
    known = re.compile("|".join({pattern for key in keys for pattern in _beginnings(key.path)}))
    return sorted({path for path in paths(report) if not known.fullmatch(path)})


def unwritten(documents: Sequence[dict[str, Any]], keys: Sequence[Key]) -> list[str]:
    """Returns the rows of the reference that none of the documents has; an empty list or map counts as written."""
    written = {path for document in documents for path in paths(document)}
    return [
        key.path
        for key in keys
        if not any(
            re.fullmatch(_pattern(path), one)
            for one in written
            for path in (key.path, key.path.removesuffix(".*"), key.path.removesuffix("[]"))
        )
    ]


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Yields the path of every value that is neither a map nor a list, and of empty ones."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from paths(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for item in value:
            yield from paths(item, f"{path}[]")
    else:
        yield path


def _pattern(path: str) -> str:
    """Returns the regular expression of a documented path."""
    parts = [(part.removesuffix("[]"), "[]" * part.endswith("[]")) for part in path.split(".")]
    return r"\.".join(_NAMES.get(name, re.escape(name)) + re.escape(end) for name, end in parts)


def _beginnings(path: str) -> Iterator[str]:
    """Yields the regular expressions of everything above a documented path too: there a report may have null, or an empty map or list."""
    parts = path.split(".")
    for number in range(1, len(parts) + 1):
        above = ".".join(parts[:number])
        yield _pattern(above.removesuffix("[]"))
        yield _pattern(above)
