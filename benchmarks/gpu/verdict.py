"""One line of the table of `make gpu-check`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Word = Literal["passed", "missed", "not measured", "told"]


@dataclass(frozen=True)
class Verdict:
    """One line of the table."""

    model: str
    line: str
    """What is judged."""
    value: float | None
    """What was measured; None: it was not."""
    limit: float | None
    """What is asked for; None: it is only told."""
    at_most: bool = False
    """Whether the limit is an upper one."""
    reason: str | None = None
    """Why it was not measured, or is only told."""

    @property
    def word(self) -> Word:
        """The verdict."""
        if self.limit is None:
            return "told"
        if self.value is None:
            return "not measured"
        return "passed" if (self.value <= self.limit if self.at_most else self.value >= self.limit) else "missed"


def passes(lines: Sequence[Verdict]) -> bool:
    """Whether nothing was missed, and nothing that has a limit was left unmeasured."""
    return all(line.word in ("passed", "told") for line in lines)
