"""A `Progress` for tests: keeps what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Told:
    """Keeps log lines and warnings, and counts how far its bars went."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    advanced: int = 0

    def log(self, message: str) -> None:
        self.lines.append(message)

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def tick(self, label: str, message: str, figures: Mapping[str, float] | None = None) -> None:
        self.lines.append(message)

    def track(self, items: Iterable[Any], label: str, total: int | None = None) -> Iterator[Any]:
        yield from items

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        def advance(steps: int) -> None:
            self.advanced += steps

        yield advance
