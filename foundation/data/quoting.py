"""Finds tsv files that a writer with quotes wrote, as pandas and csv writers do with a tab between fields; tsv has no quoting by default.

A writer puts a field in quotes where it contains a tab, a line end or a quote, and doubles the quotes in it. Then in the whole file

    each field with a quote in it begins and ends with one, and quotes inside are doubled          (1)
    some field in quotes contains a pair of quotes, a tab or a line end                             (2)

or, of a writer that puts all texts in quotes, no field but numbers is without. Texts that happen to begin with a quote break (1) within a
few rows, and do not fulfil (2). Quotes that close in a later line prove nothing where each of these lines has all its fields: there may be
two such texts.
"""

from __future__ import annotations

import re
from typing import Final

_CLOSED: Final = re.compile(r'"([^"]*(?:""[^"]*)*)"(?=\t|$)')
_OPEN: Final = re.compile(r'"[^"]*(?:""[^"]*)*$')
_END: Final = re.compile(r'[^"]*(?:""[^"]*)*"(?=\t|$)')
_INSIDE: Final = re.compile(r'[^"]*(?:""[^"]*)*$')
_PLAIN: Final = re.compile(r'[^"\t]*(?=\t|$)')
_NUMBER: Final = re.compile(r"[-+]?[\d.]*(?:[eE][-+]?\d+)?")


class Quotes:
    """Whether lines of tab-separated fields come from a writer with quotes."""

    def __init__(self) -> None:
        self.width = 0
        """Fields of the first line, without a look at quotes."""
        self.refuted = False
        """Whether some field breaks (1)."""
        self.proof = 0
        """Number of a line that fulfils (2); 0: none yet."""
        self.all_quoted = True
        """Whether no field but numbers was without quotes."""
        self.quoted = 0
        """Number of the first line with a field in quotes; 0: none yet."""
        self._open = 0
        """Number of the line in which an open field begins; 0: none is open."""
        self._whole = True
        """Whether all lines since then have all their fields."""

    @property
    def line(self) -> int:
        """The line that shows that fields are in quotes; 0 where they are not, or it is open."""
        if self.refuted or self._open:
            return 0
        return self.proof or (self.quoted if self.all_quoted else 0)

    @property
    def possible(self) -> bool:
        """Whether fields may be in quotes, as far as was seen, so that a wrong number of fields may come from it."""
        return not self.refuted and self.quoted > 0

    def see(self, number: int, line: str) -> None:
        """Takes the next line, without its end."""
        self.width = self.width or line.count("\t") + 1
        if self.refuted or (not self._open and '"' not in line and not self.all_quoted):
            return
        place = self._continued(number, line) if self._open else 0
        while place >= 0:
            place = self._field(number, line, place)

    def _continued(self, number: int, line: str) -> int:
        """Takes a line in which a field is open; returns where the next field begins, -1 for none."""
        self._whole = self._whole and line.count("\t") + 1 == self.width
        end = _END.match(line)
        if end is None:
            self.refuted = _INSIDE.match(line) is None
            return -1
        if not self._whole:
            self.proof = self.proof or self._open
        self._open = 0
        return self._behind(line, end.end())

    def _field(self, number: int, line: str, place: int) -> int:
        """Takes a field; returns where the next one begins, -1 for none."""
        closed = _CLOSED.match(line, place)
        if closed is not None:
            self.quoted = self.quoted or number
            if '""' in closed[1] or "\t" in closed[1]:
                self.proof = self.proof or number
            return self._behind(line, closed.end())
        if line.startswith('"', place) and _OPEN.match(line, place):
            self.quoted, self._open = self.quoted or number, number
            self._whole = line.count("\t") + 1 == self.width
            return -1
        plain = _PLAIN.match(line, place)
        if plain is None:
            self.refuted = True
            return -1
        self.all_quoted = self.all_quoted and _NUMBER.fullmatch(plain[0]) is not None
        return self._behind(line, plain.end())

    @staticmethod
    def _behind(line: str, end: int) -> int:
        return end + 1 if end < len(line) else -1
