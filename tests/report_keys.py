"""Whether the reference of report.json knows every key of a report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from compress.report.keys import KEYS

_NAMES = {"BACKEND": r"[^.\[\]]+", "METRIC": r"[^.\[\]]+", "PACKAGE": r"[^.\[\]]+", "*": r".*"}


def undocumented(report: dict[str, Any]) -> list[str]:
    """Returns the paths of a report that no row of the reference names."""
    known = re.compile("|".join({pattern for key in KEYS for pattern in _beginnings(key.path)}))
    return sorted({path for path in paths(report) if not known.fullmatch(path)})


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
