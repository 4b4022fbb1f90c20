"""The outcome of a search as one self-contained HTML page, in the house style of the report (`compress.report.page`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compress.report import phrases
from compress.report.charts import scatter
from compress.report.labelled import labelled
from compress.report.model.contents import Configuration, JudgedMetric
from compress.report.page import template
from compress.report.sections import accuracy
from compress.report.view import View
from compress.search.model import Candidate, Point, Record, Search
from compress.search.space import words


def render(contents: Search) -> str:
    """Returns the page of a search.

    Args:
        contents: The contents of `search.json`.

    Returns:
        One self-contained HTML document.
    """
    metric = contents.metric.name
    page = template("search.html.j2").render(
        name=contents.name,
        facts=[contents.task, contents.environment.cpu],
        verdict=_verdict(contents),
        sentence=_sentence(contents),
        state="open" if contents.recommended is None else "missed" if contents.recommended.missed else "met",
        figures=_figures(contents),
        metric=metric,
        lower_is_better=not contents.metric.higher_is_better,
        rows=contents.rows,
        recommended=contents.recommended,
        plots=_plots(contents),
        points=[_point(point, contents) for point in contents.front],
        knobs=_knobs(contents),
        objectives=contents.objectives,
        rungs=_rungs(contents),
        candidates=[_candidate(one, contents) for one in contents.candidates],
        goals=[f"{name}: {value}" for name, value in contents.goals.items() if value not in (None, [])],
        environment=[(key, str(value)) for key, value in contents.environment.versions.items()],
        meets=contents.meets_goals,
    )
    return labelled(page)


def _verdict(contents: Search) -> list[tuple[str, bool]]:
    """Returns the headline in pieces, with whether each is emphasized."""
    chosen, metric = contents.recommended, contents.metric.name
    if chosen is None:
        return [(f"None of {len(contents.candidates)} candidates has finished", False)]
    found = chosen.evaluation
    pieces = [("Recommended: ", False), (words(chosen.values), True), (f", {metric} ", False)]
    pieces += [(phrases.figure(found.metric.value, metric), True)]
    if found.latency is not None:
        pieces += [(" in ", False), (f"{phrases.milliseconds(found.latency)} ms", True)]
    return pieces


def _sentence(contents: Search) -> str:
    chosen = contents.recommended
    if chosen is None:
        return "no candidate has finished"
    if chosen.missed:
        return f"on the evaluation split it misses {', '.join(chosen.missed)}"
    return "it meets every goal on the evaluation split" if contents.goals else "the recipe sets no goals"


def _figures(contents: Search) -> list[View]:
    chosen, metric = contents.recommended, contents.metric.name
    states = [one.state for one in contents.candidates]
    tiles = [_tile("Candidates", str(len(states)), f"{states.count('finished')} finished, {states.count('dropped')} dropped")]
    tiles += [_tile("Front", str(len(contents.front)), "points, each a recipe to run")]
    if chosen is not None:
        found = chosen.evaluation
        spread = phrases.interval(found.metric.low, found.metric.high, metric)
        note = f"n {found.metric.n}" + (f", 95 % {spread}" if spread else "")
        tiles.append(_tile(metric.capitalize(), phrases.figure(found.metric.value, metric), note))
        lost = phrases.change_interval(found.drop.low, found.drop.high, metric)
        change = phrases.change(found.drop.value, metric) or phrases.NOT_MEASURED
        tiles.append(_tile("Change", change, "against the baseline in torch" + (f", 95 % {lost}" if lost else "")))
        tiles.append(_tile("Speed-up", phrases.ratio(found.speedup), "over the baseline in torch, at the worst shape"))
    return tiles


def _tile(name: str, text: str, note: str) -> View:
    return {"name": name, "known": text != phrases.NOT_MEASURED, "text": text, "note": note}


def _plots(contents: Search) -> View | None:
    """Returns the metric against time: finished candidates on selection rows, the recommended one marked; None where nothing has both."""
    metric = contents.metric.name
    chosen = None if contents.recommended is None else contents.recommended.number
    points = []
    for one in contents.candidates:
        metric_value, time = (None if one.results is None else one.results.get(name) for name in ("metric", "latency"))
        if metric_value is None or not time:
            continue
        role = "served" if one.number == chosen else "reference" if one.own else "other"
        title = f"{one.name}: {words(one.values)}; {phrases.figure(metric_value, metric)}, {time:.4g} ms"
        served = one.rungs["full"].served
        points.append(scatter.Point(time, metric_value, None, None, one.name, title, str(served and served.engine), role))
    if not points:
        return None
    return accuracy.plot(JudgedMetric.model_validate(contents.metric.written()), points, (440, 340))


def _point(point: Point, contents: Search) -> View:
    metric, found = contents.metric.name, point.evaluation
    chosen = contents.recommended is not None and contents.recommended.number == point.number
    return {
        "name": point.name,
        "values": words(point.values),
        "recommended": chosen,
        "recipe": point.recipe,
        "report": f"{point.run}/report.html",
        "metric": phrases.figure(found.metric.value, metric),
        "spread": phrases.interval(found.metric.low, found.metric.high, metric),
        "n": found.metric.n,
        "selection": phrases.figure(point.selection["metric"], metric),
        "change": phrases.change(found.drop.value, metric) or phrases.NOT_MEASURED,
        "change_spread": phrases.change_interval(found.drop.low, found.drop.high, metric),
        "time": phrases.milliseconds(found.latency),
        "speedup": phrases.ratio(found.speedup),
        "size": phrases.size(found.size),
        "throughput": phrases.rate(found.throughput),
        "served": phrases.configuration(Configuration.model_validate(point.served.written())) if point.served.engine else "nothing",
        "missed": ", ".join(point.missed) or "none",
    }


def _knobs(contents: Search) -> list[View]:
    """Returns each knob with its values and, for each objective, the share of the differences that it explains; None if unknown."""
    rows = []
    for knob in contents.space:
        values = f"{knob.low:g} to {knob.high:g}" if knob.kind == "range" else ", ".join(_value(one) for one in knob.choices)
        shares = [(contents.importances[name] or {}).get(knob.path) for name in contents.objectives]
        bars = [None if share is None else {"percent": round(100 * share, 1), "text": phrases.share(share)} for share in shares]
        rows.append({"path": knob.path, "values": values, "bars": bars})
    return rows


def _value(value: object) -> str:
    return words({"": value})[1:]


def _rungs(contents: Search) -> list[View]:
    """Returns each rung with how many came, how many it dropped and how long it took."""
    rows = []
    for rung in contents.rungs:
        here = [one.rungs[rung.name] for one in contents.candidates if rung.name in one.rungs]
        dropped = sum(one.dropped is not None and one.dropped.rung == rung.name for one in contents.candidates)
        seconds = sum(record.seconds or 0.0 for record in here)
        rows.append({**rung.written(), "came": len(here), "dropped": dropped, "time": phrases.duration(seconds)})
    return rows


def _candidate(one: Candidate, contents: Search) -> View:
    metric, results = contents.metric.name, one.results
    told = _reached(one.rungs, metric)
    fate = f"dropped at {one.dropped.rung}" if one.dropped else "front" if one.front else one.state
    why = one.dropped.reason if one.dropped else f"misses {', '.join(one.missed)}" if one.missed else ""
    if one.state == "finished" and not one.front and not why:
        why = "another one is at least as good in every objective"
    return {
        "name": one.name,
        "own": one.own,
        "values": words(one.values),
        "rungs": told,
        "metric": phrases.figure(results["metric"], metric) if results else "",
        "time": phrases.milliseconds(results["latency"]) if results else "",
        "size": phrases.size(results["size"]) if results else "",
        "fate": fate,
        "why": why,
        "seconds": phrases.duration(one.seconds),
    }


def _reached(rungs: Mapping[str, Record], metric: str) -> Sequence[str]:
    """Returns the records of the rungs before the last one, one line each."""
    lines = []
    size, latency = rungs.get("size", Record()), rungs.get("latency", Record())
    if size.macs is not None:
        lines.append(f"{phrases.count(size.macs)} MACs, weights {phrases.size(size.weight_bytes)}")
    if latency.relative is not None:
        lines.append(f"shape: {phrases.ratio(1 / latency.relative)} of the baseline's speed")
    for name, words_ in (("untrained", "untrained"), ("short", "short training")):
        if "metric" in rungs.get(name, Record()).model_fields_set:
            lines.append(f"{words_}: {phrases.figure(rungs[name].metric, metric)}")
    return lines
