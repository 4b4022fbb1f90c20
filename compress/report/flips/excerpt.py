"""The part of `flips.jsonl` that the report shows: rows whose answer changed, with their texts."""

from __future__ import annotations

import json
from pathlib import Path

from compress.report.model.contents import Flip
from foundation.artifacts.artifact import DamagedArtifact
from foundation.core.shown import reason

MOST_ROWS, MOST_CHARACTERS = 60, 2000
KEYS = [field.alias or name for name, field in Flip.model_fields.items()]


def excerpt(file: Path, served: str | None) -> list[Flip] | None:
    """Returns up to 60 lines of `flips.jsonl`, served variant first, spread evenly over the steps; None if there is no such file.

    Args:
        file: `flips.jsonl`.
        served: Id of the served variant.

    Raises:
        DamagedArtifact: The file is none that a run wrote.
    """
    if not file.is_file():
        return None
    try:
        lines = [_line(json.loads(line)) for line in file.read_text(encoding="utf-8").split("\n") if line]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedArtifact(f"{file}", f"damaged ({reason(error)})") from error
    steps: dict[tuple[str | None, str | None], list[Flip]] = {}
    for line in sorted(lines, key=lambda line: line.variant != served):
        steps.setdefault((line.variant, line.to), []).append(line)
    chosen: list[Flip] = []
    for own in (True, False):
        groups = [group for (variant, _), group in steps.items() if (variant == served) == own]
        room = MOST_ROWS - len(chosen)
        turns = [(number, place) for place, group in enumerate(groups) for number in range(len(group))]
        taken = sorted(sorted(turns)[:room], key=lambda turn: (turn[1], turn[0]))
        chosen += [groups[place][number] for number, place in taken]
    return chosen


def _line(line: dict[str, object]) -> Flip:
    known = {key: _short(line[key]) for key in KEYS if key in line}
    return Flip.model_validate({**known, "variant": str(line["variant"]), "to": str(line["to"])})


def _short(value: object) -> object:
    """Returns a text, or the texts of a pair, cut to a length that a page can hold."""
    if isinstance(value, list):
        return [_short(part) for part in value]
    return value if not isinstance(value, str) or len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]} ..."
