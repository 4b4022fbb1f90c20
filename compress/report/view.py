"""Types and text formatting that all sections of the page share."""

from __future__ import annotations

from typing import Any

from compress.report.phrases import NOT_MEASURED

View = dict[str, Any]


def percent(part: float) -> str:
    """Returns a share in percent with one digit; `< 0.1` for a positive share that would round to 0."""
    return f"{100 * part:.1f}" if part >= 0.0005 or not part else "< 0.1"


def or_unmeasured(value: float | None, style: str = ",") -> str:
    """Returns a number as text, or `not measured`."""
    return NOT_MEASURED if value is None else format(value, style)


def plain(value: object) -> str:
    """Returns a manifest value as text."""
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "unknown" if value is None else str(value)


def is_scalar(value: object) -> bool:
    """Whether a value is a number, a string or a list of these."""
    return isinstance(value, str | int | float) or (isinstance(value, list) and all(isinstance(item, str | int | float) for item in value))
