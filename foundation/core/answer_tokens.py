"""Token ids of a model's answers, from generation_config.json. Imports little, as processes of engines read it.

ends     eos_token_id: what ends an answer, in every engine
start    decoder_start_token_id: what the decoder of an encoder-decoder reads first, where config.json does not say it
first    forced_bos_token_id: the first token of its answers, such as the language of mBART
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.core.decoding import end_ids
from foundation.core.errors import InputError, Problem

FILE = "generation_config.json"
SHOWN = 40
"""Characters of a value in a message."""


@dataclass(frozen=True)
class AnswerTokens:
    """Token ids of a model's answers."""

    ends: tuple[int, ...] = ()
    start: int | None = None
    first: int | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> AnswerTokens:
        """Reads the settings of a file.

        Raises:
            InputError: A token id is none.
        """
        problems = []
        for name, several in (("eos_token_id", True), ("decoder_start_token_id", False), ("forced_bos_token_id", False)):
            given = settings.get(name)
            ids = given if several and isinstance(given, list) else [] if given is None else [given]
            if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
                allowed = "a token id, a list of them or null" if several else "a token id or null"
                problems.append(Problem(FILE, f"{name}: {json.dumps(given)[:SHOWN]} given", f"{allowed} is allowed"))
        if problems:
            raise InputError.of(problems)
        return cls(end_ids(settings.get("eos_token_id")), settings.get("decoder_start_token_id"), settings.get("forced_bos_token_id"))

    @classmethod
    def of_folder(cls, folder: Path) -> AnswerTokens:
        """Reads the file of a folder, which has to be there.

        Raises:
            InputError: The file is damaged.
        """
        return cls.of(read(folder / FILE))


def read(file: Path) -> dict[str, Any]:
    """Returns the settings of a file.

    Raises:
        InputError: It is damaged.
    """
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}", "not JSON", remedy="write the file again, or remove it") from error
    if not isinstance(settings, dict):
        raise InputError(f"{file}", "a JSON object is expected", remedy="write the file again, or remove it")
    return settings
