"""The functions of the report, called with reports as plain data: tests change single keys of these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.report import decision, goals, page, report
from compress.report import summary as lines
from compress.report.model.contents import Contents
from foundation.core.goals import Goals

Plain = dict[str, Any]


def contents(plain: Mapping[str, Any]) -> Contents:
    """Returns the contents of a report."""
    return Contents.model_validate(plain)


def render(plain: Mapping[str, Any]) -> str:
    """Returns its page."""
    return page.render(contents(plain))


def decision_of(plain: Mapping[str, Any]) -> decision.Decision:
    """Returns its decision."""
    return decision.decision_of(contents(plain))


def summary(plain: Mapping[str, Any], folder: Path) -> list[str]:
    """Returns its lines on the console."""
    return lines.summary(contents(plain), folder)


def judge(limits: Mapping[str, Any] | None, plain: Mapping[str, Any]) -> list[Plain]:
    """Returns its judged goals."""
    return [goal.written() for goal in goals.judge(Goals.model_validate(limits or {}), contents(plain))]


def findings(limits: Mapping[str, Any] | None, plain: Mapping[str, Any]) -> list[Plain]:
    """Returns its findings."""
    return [goal.written() for goal in goals.findings(Goals.model_validate(limits or {}), contents(plain))]


def settled(plain: Mapping[str, Any], limits: Mapping[str, Any] | None) -> Plain:
    """Returns it with its goals judged."""
    return report.settled(contents(plain), Goals.model_validate(limits or {})).written()
