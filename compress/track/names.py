"""Figures of a report and settings of a recipe under flat names, as tracking servers take them.

A name is the path of a key of report.json (`docs/reference/report.md`), with `/` between its parts:

    variants[].accuracy.BACKEND.value    variants/quantize/accuracy/openvino/value
    variants[].latency[].p50_ms          variants/quantize/latency/openvino-static-int8-fp32-1-128/p50_ms
    goals[].value                        goals/max_drop/value

An entry of a list is called by the values of the fields in `IDENTITY`, or by its place from 0; the second entry of the same name gets the
suffix `.2`. Characters that a server does not take become `_`. Numbers are metrics, with 1 and 0 for true and false. Texts that are not
entries of a list are tags, as they may change when a run is repeated. What is null has no name. A recipe is flattened the same way.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from compress.report.model.answers import Answer
from compress.report.model.contents import ClassRow, Contents, Goal, Ranked, Split, Stage
from compress.report.model.variant import Attention, Latency, Variant
from foundation.artifacts.document import Document
from foundation.artifacts.exported import Layer, LayerParity
from foundation.artifacts.timed import ProposedSpeed, Speed
from foundation.artifacts.triton import Limit, Load, TritonModel

CONFIGURATION = ("variant", "engine", "mode", "precision", "float_precision", "cache_precision", "capability")
IDENTITY: Mapping[type[Document], tuple[str, ...]] = {
    Variant: ("id",),
    Stage: ("id",),
    Latency: (*CONFIGURATION, "batch", "sequence"),
    Attention: CONFIGURATION,
    Answer: CONFIGURATION,
    Ranked: CONFIGURATION,
    Layer: ("name",),
    LayerParity: ("layer",),
    Speed: ("prompt_tokens", "streams"),
    ProposedSpeed: ("prompt_tokens", "streams"),
    TritonModel: ("model",),
    Load: ("concurrency",),
    Limit: ("batch", "sequence"),
    Goal: ("goal",),
    ClassRow: ("name",),
    Split: ("split",),
}
"""Fields that an entry of a list is called by."""
NAMED = ("id", "name", "layer")
"""The same for maps of `Figures`."""
NO_FIGURES = ("schema", "recipe", "commands", "flipped_rows")
"""Keys of a report that hold none."""
LONGEST_PART, LONGEST_NAME = 80, 250
"""Characters. MLflow refuses longer names."""
LONGEST_TEXT = 500
"""Characters of a setting or text: what servers of every version take."""


@dataclass(frozen=True)
class Flat:
    """Figures under flat names."""

    numbers: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """Texts that are not entries of a list."""


def figures(document: Document) -> Flat:
    """Returns every number of a report, or of a part of one such as a variant, and its texts outside of lists."""
    flat = Flat()
    left_out = NO_FIGURES if isinstance(document, Contents) else ()
    _collect(flat, _entries(document), (), left_out)
    return flat


def settings(plain: Mapping[str, object]) -> dict[str, str]:
    """Returns the settings of a recipe, or of a stage, as texts; a list of plain values is one setting, and what is null or empty none.

    Args:
        plain: The recipe as plain data: `stages` is a list of maps with one key.
    """
    stages = plain.get("stages")
    if isinstance(stages, list):
        bodies = [next(iter(entry.values())) for entry in stages]
        plain = {**plain, "stages": {str(body["id"]): body for body in bodies}}
    return {_joined(path): _cut(text) for path, text in _settings(plain, ())}


def _settings(value: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, Mapping):
        for name, inner in _named((str(key), inner) for key, inner in value.items()):
            yield from _settings(inner, (*path, name))
    elif isinstance(value, list | tuple) and any(isinstance(entry, Mapping | list | tuple) for entry in value):
        for place, inner in enumerate(value):
            yield from _settings(inner, (*path, str(place)))
    elif value is not None and value not in ("", [], ()):
        yield path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _collect(
    flat: Flat, entries: Iterable[tuple[str, object]], path: tuple[str, ...], left_out: Sequence[str], listed: bool = False
) -> None:
    """Adds the figures of a map.

    Args:
        flat: Gets them.
        entries: The entries of the map.
        path: Its place.
        left_out: Keys that are left out.
        listed: Whether it is below a list.
    """
    for name, value in _named((name, value) for name, value in entries if name not in left_out):
        place = (*path, name)
        if isinstance(value, bool | int | float):
            flat.numbers[_joined(place)] = float(value)
        elif isinstance(value, str):
            if not listed:
                flat.texts[_joined(place)] = _cut(value)
        elif isinstance(value, Document | Mapping):
            _collect(flat, _entries(value), place, (), listed)
        elif isinstance(value, list | tuple):
            _collect(flat, [(_called(entry, number), entry) for number, entry in enumerate(value)], place, (), True)


def _entries(value: Document | Mapping[str, object]) -> list[tuple[str, object]]:
    """Returns the entries of a map under their names in report.json."""
    if not isinstance(value, Document):
        return [(str(key), inner) for key, inner in value.items()]
    fields = type(value).model_fields
    known = [(field.alias or name, getattr(value, name)) for name, field in fields.items() if name in value.model_fields_set]
    return [*known, *(value.model_extra or {}).items()]


def _called(entry: object, number: int) -> str:
    """Returns what an entry of a list is called."""
    values: list[object] = []
    if isinstance(entry, Document):
        values = [getattr(entry, name, None) for name in IDENTITY.get(type(entry), ())]
    elif isinstance(entry, Mapping):
        values = [next((entry[name] for name in NAMED if isinstance(entry.get(name), str)), None)]
    return "-".join(str(value) for value in values if value not in (None, "")) or str(number)


def _named(entries: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """Yields the entries of one map under names that servers take, each different."""
    seen: dict[str, int] = {}
    for name, value in entries:
        clean = re.sub(r"[^\w.\- ]", "_", name).strip(" .") or "_"
        clean = _short(clean, LONGEST_PART)
        seen[clean] = seen.get(clean, 0) + 1
        yield (clean if seen[clean] == 1 else f"{clean}.{seen[clean]}"), value


def _joined(path: Sequence[str]) -> str:
    return _short("/".join(path), LONGEST_NAME)


def _short(name: str, longest: int) -> str:
    """Returns a name whose end is a digest of the whole name if it is too long."""
    return name if len(name) <= longest else f"{name[: longest - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."
