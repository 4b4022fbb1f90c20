"""JSON files in the user's cache folder (`foundation.machine.environment.cache_folder`). They only save time.

A file that is absent or damaged reads as None. A folder that cannot be written keeps nothing, and no result depends on it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from foundation.machine.environment import cache_folder


def cached_file(kind: str, depends_on: Mapping[str, object]) -> Path:
    """Returns the file of one kind of contents.

    Args:
        kind: Name of its folder.
        depends_on: JSON types; other values name another file.
    """
    key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / kind / f"{key}.json"


def read_cached(file: Path) -> Any:
    """Returns the contents of a file; None if it is absent, cannot be read, or was cut off by a kill."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_cached(file: Path, contents: Any) -> None:
    """Writes a file whole or not at all; does nothing if the folder cannot be written.

    Args:
        file: The file; its folder is made.
        contents: JSON types, numbers finite.
    """
    text = json.dumps(contents, allow_nan=False)
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(file)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
