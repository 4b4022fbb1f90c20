"""Maps labels to ids: names of a model and of data are equal if they differ only in spaces, case, or Unicode composition.

Names that are equal then stay apart, and are matched letter by letter.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from foundation.core.errors import InputError

NONE = -1
_GENERIC = re.compile(r"(LABEL_)?\d+", re.IGNORECASE)


def plain(name: str) -> str:
    """Returns the normalized name that names are compared by: composed letters, one space between words, no case."""
    return " ".join(unicodedata.normalize("NFC", name).split()).casefold()


class SameName:
    """Finds the id of a name.

    Args:
        names: Class names by id.
    """

    def __init__(self, names: Sequence[str]) -> None:
        counts = Counter(map(plain, names))
        self.exact = {name: index for index, name in enumerate(names)}
        self.alike = {plain(name): index for index, name in enumerate(names) if counts[plain(name)] == 1}

    def __call__(self, name: str) -> int:
        """Returns the id; `NONE` where no name is the same, or several are alike."""
        found = self.exact.get(name)
        return self.alike.get(plain(name), NONE) if found is None else found


def merged(every: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the names of several files, each by id, as one list: the names of the first, and after them what only others have."""
    found: dict[str, str] = {}
    for names in every:
        same = SameName(names)
        for name in names:
            found.setdefault(plain(name) if plain(name) in same.alike else name, name)
    return tuple(found.values())


def order_of(own: tuple[str, ...], names: tuple[str, ...], where: str, origin: str) -> list[int]:
    """Returns the ids that the classes of a file have among other names.

    They are matched by name; by place only where the names do not contradict it: none of them is at another place.

    Args:
        own: Names by id, as the file numbers them.
        names: Names by id of the model or of the train split.
        where: File and line, for the message.
        origin: Where `names` come from, for the message.

    Raises:
        InputError: They cannot be matched.
    """
    same = SameName(names)
    found = [same(name) for name in own]
    if NONE not in found and len(set(found)) == len(found):
        return found
    if len(own) == len(names) and all(index in (NONE, place) for place, index in enumerate(found)):
        return list(range(len(names)))
    raise InputError(
        where,
        f"the column numbers {len(own)} classes ({listed(own)}), {origin} has {len(names)} ({listed(names)})",
        remedy="rename them, or give model.head: new",
    )


def by_place(own: tuple[str, ...], names: tuple[str, ...]) -> str:
    """Returns which names of a file stand for which others at the same place, in words; empty where names decide, or one side has none.

    Names that are numbers are none, unless they number the classes otherwise than their places do: class_encode_column of datasets sorts
    integers as text (5.2), so that class 2 of twelve is called "10". Whether a model counts the integers or the places no file says.
    """
    same = SameName(names)
    if len(own) != len(names) or all(same(name) != NONE for name in own):
        return ""
    places = list(range(len(own)))
    if all(map(_GENERIC.fullmatch, own)):
        numbers = [int(name.upper().removeprefix("LABEL_")) for name in own]
        places = [place for place in places if sorted(numbers) == places and numbers[place] != place]
    elif all(map(_GENERIC.fullmatch, names)):
        return ""
    pairs = [f"{own[place]!a} = {names[place]!a}" for place in places]
    return ", ".join(pairs[:12]) + (", ..." if len(pairs) > 12 else "")


def listed(names: Sequence[str]) -> str:
    """Returns names for a message; in quotes where they begin or end with a space."""
    shown = [name[:60] if name == name.strip() else f"{name[:60]!r}" for name in names[:12]]
    return ", ".join(shown) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")
