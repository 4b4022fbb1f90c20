"""What `compress search` prints at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from compress.report import phrases
from compress.report.summary import plain_text
from compress.search.model import Search
from compress.search.space import words
from foundation.core.shown import pasted


def summary(contents: Search, folder: Path) -> list[str]:
    """Returns the points of the front on the evaluation split, the recommended one, and the paths of the results; one line each, ASCII.

    Args:
        contents: The contents of `search.json`.
        folder: The search folder.
    """
    return [plain_text(line) for line in _lines(contents, folder)]


def _lines(contents: Search, folder: Path) -> Iterator[str]:
    metric, states = contents.metric.name, [one.state for one in contents.candidates]
    yield (
        f"{len(states)} candidates: {states.count('finished')} finished, {states.count('dropped')} dropped, "
        f"in {phrases.duration(contents.seconds)} of work"
    )
    for point in contents.front:
        found = point.evaluation
        spread = phrases.interval(found.metric.low, found.metric.high, metric)
        value = phrases.figure(found.metric.value, metric) + (f" ({spread})" if spread else "")
        figures = [f"{metric} {value}"]
        figures += [f"{phrases.milliseconds(found.latency)} ms"] if found.latency is not None else []
        figures += [f"{phrases.ratio(found.speedup)} over torch"] if found.speedup is not None else []
        figures += [phrases.size(found.size)] if found.size is not None else []
        missed = f"; misses {', '.join(point.missed)}" if point.missed else ""
        yield f"  {point.name}: {', '.join(figures)}{missed} [{words(point.values)}]"
    chosen = contents.recommended
    if chosen is not None:
        yield f"recommended: {chosen.name}, {chosen.reason}"
        yield f"run it: {pasted('compress', 'run', folder / chosen.recipe)}"
    else:
        yield "recommended: none, as no candidate has finished"
    yield f"report: {folder / 'search.html'}"
