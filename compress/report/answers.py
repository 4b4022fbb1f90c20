"""How well and how fast the engines of a run answer prompts: read from its artifacts, by variant.

The agreement of an engine compares its greedy answers with the float baseline in torch (`foundation.measure.tokens`); its speeds come
from `foundation.measure.generation`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compress.report.evaluations import builds, judged
from compress.report.intervals import paired
from foundation.artifacts import artifact
from foundation.artifacts.run_folder import Run
from foundation.core.engines import REFERENCE
from foundation.measure.answers import load_groups, load_logits, load_predictions

GENERATION = "generation.json"


def answers(run: Run, variant: str) -> list[dict[str, Any]]:
    """Returns one entry for each engine of a variant that answers prompts, the recommended one of a build first.

    Each holds `engine`, `mode`, `precision`, `float_precision`, `cache_precision`, `metrics`, `quality` (BLEU and chrF; None without
    references), `agreement` (with the baseline, and with the same checkpoint in torch), `cache_cost`: what a cache in less than
    `float_precision` changed, None where it is in that; `speeds`, one for each load, and `speculation`: what tokens that are proposed to
    it did, None where none are.
    """
    measured = _measured(run).get("rows", [])
    proposals = _measured(run).get("proposals", [])
    found = []
    for build in builds(run):
        for entry in build["engines"]:
            if build["variant"] == variant and entry["runnable"] and "generation" in entry:
                what = {"engine": entry["engine"], "mode": entry["mode"], "precision": build["precision"]}
                what["float_precision"] = entry["float_precision"]
                speeds = _of(measured, variant, what)
                generation = entry["generation"]
                found.append(
                    {
                        **what,
                        "cache_precision": entry["cache_precision"],
                        "metrics": entry["metrics"],
                        "prompt_tokens": generation["prompt_tokens"],
                        "questions": generation.get("questions", False),
                        "quality": generation.get("quality"),
                        "agreement": {"baseline": generation["baseline"], REFERENCE: generation[REFERENCE]},
                        "cache_cost": _cache_cost(run, entry),
                        "speeds": speeds,
                        "speculation": _speculation(entry.get("speculation"), _of(proposals, variant, what)),
                    }
                )
    return found


def _cache_cost(run: Run, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Compares an engine with the same engine with a float cache (`export.generation.float_cache`); None where its own is one."""
    told, exported = entry["generation"].get("float_cache"), run.of_kind("engine")
    if told is None or exported is None:
        return None
    before, labels = load_predictions(exported.path / told["predictions"], run.recipe["model"]["task"])
    after = load_logits(exported.path / entry["predictions"])
    groups = load_groups(run.predictions(run.baseline))
    change = paired(judged(run).metric, before, after, labels, groups=groups)
    return {"metrics": told["metrics"], "change": change, "tokens": told["tokens"]}


def _of(rows: Sequence[Mapping[str, Any]], variant: str, what: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of one engine, without what it is."""
    mine = [row for row in rows if row["variant"] == variant and all(row[key] == value for key, value in what.items())]
    return [{key: value for key, value in row.items() if key not in ("variant", "device", "cache_precision", *what)} for row in mine]


def _speculation(told: Mapping[str, Any] | None, speeds: list[dict[str, Any]]) -> dict[str, Any] | None:
    if told is None:
        return None
    kept = ("draft", "tokens", "compared", "proposed", "accepted", "tokens_per_step")
    return {**{key: told[key] for key in kept}, "speeds": speeds}


def bandwidth(run: Run) -> float | None:
    """Returns the bytes per second that the machine read when the speeds were measured; None where no engine answers prompts."""
    rate: float | None = _measured(run).get("bandwidth_bytes_per_s")
    return rate


def _measured(run: Run) -> dict[str, Any]:
    """Returns what the step `latency` wrote about answers; empty where no engine answers prompts."""
    step = run.of_kind("latency")
    if step is None or not (step.path / GENERATION).exists():
        return {}
    found: dict[str, Any] = artifact.read_json(step.path / GENERATION)
    return found
