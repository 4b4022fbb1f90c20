"""Names of adapters: what a column, a recipe and a request may call them."""

from __future__ import annotations

import re
from numbers import Integral

from foundation.core.errors import InputError
from foundation.core.shown import shown

NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
ALLOWED = "up to 64 letters, digits, '.', '_' and '-', a letter or digit first, are allowed"


def check_name(given: object, place: str) -> str:
    """Returns the name of an adapter; a whole number, as tables may hold, is its digits.

    Args:
        given: What a cell or a setting holds.
        place: Where it stands, for the message.

    Raises:
        InputError: It is no name.
    """
    text = str(given) if isinstance(given, Integral) and not isinstance(given, bool) else given
    if not isinstance(text, str) or not re.fullmatch(NAME, text):
        raise InputError(place, f"{shown(given, 60)} given as the name of an adapter", ALLOWED)
    return text
