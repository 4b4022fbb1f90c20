"""Settings of a load: open or closed loop, its size, its duration."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from foundation.core.errors import InputError, Problem

MOST_REQUESTS = 5_000_000
"""Requests of one load; each needs some hundred bytes."""


@dataclass(frozen=True)
class Load:
    """One load. `rate` makes it an open loop, `concurrency` a closed one.

    Raises:
        InputError: A value is out of its range, or not exactly one of the two is given.
    """

    rate: float | None = None
    """Mean number of requests per second; they arrive as a Poisson process."""
    concurrency: int | None = None
    """Requests under way at any time."""
    rows: int = 1
    """Rows of a request."""
    seconds: float = 10.0
    """How long requests are sent; answers are awaited after that."""
    timeout_s: float = 30.0
    """Most seconds for an answer, from the sending."""
    outstanding: int = 512
    """Most requests under way in an open loop. Those that are due beyond are not sent, and reported as shed."""
    seed: int = 0
    """Seed of the arrivals, and of the order of the rows."""

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise InputError("rate, concurrency", f"{self.rate} and {self.concurrency} given", "exactly one of the two is allowed")
        problems = [
            Problem(name, f"{value} given", f"{least} to {most} is allowed")
            for name, value, least, most in (
                ("rate", self.rate, 0.001, 1_000_000),
                ("concurrency", self.concurrency, 1, 4096),
                ("rows", self.rows, 1, 4096),
                ("seconds", self.seconds, 0.1, 86_400),
                ("timeout_s", self.timeout_s, 0.001, 3600),
                ("outstanding", self.outstanding, 1, 4096),
                ("seed", self.seed, 0, 2**63),
            )
            if value is not None and not (isfinite(value) and least <= value <= most)
        ]
        if self.rate is not None and self.rate * self.seconds > MOST_REQUESTS:
            problems.append(
                Problem(
                    "rate",
                    f"{self.rate:g} given for {self.seconds:g} s",
                    f"at most {MOST_REQUESTS} requests are sent",
                    "give fewer seconds",
                )
            )
        if problems:
            raise InputError.of(problems)
