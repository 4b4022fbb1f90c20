"""The meaning of every key of `compare.json`: the source of the reference page; a test checks it against real comparisons.

Paths are written as in `compress.report.keys`.
"""

from __future__ import annotations

from collections.abc import Iterator

from compress.report.keys import Key


def _runs() -> Iterator[tuple[str, str, str]]:
    """Yields the keys of a run."""
    yield "runs[].key", "text", "Letter of the run: A, B, ... in the order of the command."
    yield "runs[].name", "text", "`name` of its recipe."
    yield "runs[].folder", "text", "Its folder, as it was given."
    yield "runs[].created", "text", "When it finished; null in runs that do not say."
    yield "runs[].anchor", "text", "Digest of all its files, as in its report.json; null in runs of earlier versions."
    yield "runs[].metric", "text", "Its primary metric."
    yield "runs[].baseline.variant", "text", "Id of its baseline."
    yield "runs[].baseline.checkpoint", "text", "Digest of the checkpoint of the baseline: equal ones are the same model."
    yield "runs[].rows.n", "integer", "Evaluated rows (tokens where text is generated)."
    yield "runs[].rows.sha256", "text", "`evaluation_rows.sha256` of its report.json; null in runs of earlier versions."
    yield "runs[].served.variant", "text", "Id of the variant that it serves; `served` is null where no engine was built."
    yield "runs[].served.precision", "text", "Its precision."
    yield "runs[].served.float_precision", "text", "Precision of its layers that are not quantized."
    yield "runs[].served.engine", "text", "Its engine."
    yield "runs[].served.mode", "text", "The mode of its engine."
    yield "runs[].accuracy.backend", "text", "The last backend that evaluated what is served: triton, else its engine, else torch."
    yield "runs[].accuracy.value", "number", "The primary metric there."
    yield "runs[].accuracy.low", "number", "Lower end of its 95 % interval."
    yield "runs[].accuracy.high", "number", "Upper end of its 95 % interval."
    yield "runs[].accuracy.n", "integer", "Rows that it was computed from."
    yield "runs[].accuracy.in_train", "integer", "How many of these rows are trained on; null: none."
    yield "runs[].drop.value", "number", "What it lost against the baseline of its own run in torch, as `max_drop` is judged by."
    yield "runs[].drop.low", "number", "Lower end of the 95 % interval of the drop."
    yield "runs[].drop.high", "number", "Upper end of the 95 % interval of the drop."
    yield "runs[].drop.reason", "text", "Why it was not measured."
    yield "runs[].speedup.value", "number", "Speed-up over torch of its own run, as `min_speedup` is judged by."
    yield "runs[].speedup.low", "number", "Lower end of its 95 % interval; null in runs that do not say."
    yield "runs[].speedup.high", "number", "Upper end of its 95 % interval."
    yield "runs[].speedup.busy", "boolean", "Whether other work on the machine spoiled it."
    yield "runs[].speedup.at", "text", "Where it was measured: engine and shape."
    yield "runs[].speedup.reason", "text", "Why it was not measured."
    yield "runs[].size_bytes", "integer", "Bytes that the engine of what is served loads; null where none was built."
    yield "runs[].goals[].*", "map", "A judged goal: the keys of `goals[]` of report.json."
    yield (
        "runs[].machine.*",
        "map",
        "What its times depend on: `environment` of report.json, `device`, `threads`, `compress`, `versions.PACKAGE`.",
    )
    yield "runs[].defaulted[]", "text", "Keys that its stored recipe does not have: defaults of this version stand for them in `recipe`."
    yield "runs[].warnings[]", "text", "`warnings` of its report.json."


def _pairs() -> Iterator[tuple[str, str, str]]:
    """Yields the keys of a pair."""
    yield (
        "pairs[].kind",
        "text",
        "`served`: what two runs serve, for every two runs; `same name`: a variant in a backend, and the one with the same name in the "
        "first run.",
    )
    for place in ("first", "second"):
        yield f"pairs[].{place}.run", "text", f"Letter of the run of the {place} model; `{place}` is null where nothing was evaluated."
        yield f"pairs[].{place}.variant", "text", "Id of its variant."
        yield f"pairs[].{place}.backend", "text", "Its backend."
    yield (
        "pairs[].reason",
        "text",
        "Why the two cannot be compared row by row: other rows, or another metric. Null: the keys below are there.",
    )
    yield "pairs[].first_value", "number", "The primary metric of the first model, on the rows of both."
    yield "pairs[].second_value", "number", "The primary metric of the second model."
    yield "pairs[].difference", "number", "First minus second: positive is a loss of the second; for perplexity the relative increase."
    yield "pairs[].low", "number", "Lower end of its paired 95 % interval; null where there are too few groups."
    yield "pairs[].high", "number", "Upper end of its paired 95 % interval."
    yield "pairs[].groups", "integer", "Groups of rows that the interval is drawn over."
    yield "pairs[].interval_reason", "text", "Only where there is no interval: why."
    yield "pairs[].n", "integer", "Number of rows (tokens where text is generated)."
    yield "pairs[].right_to_wrong", "integer", "Rows that are right in the first and wrong in the second; null unless labels are classes."
    yield "pairs[].wrong_to_right", "integer", "Rows that are wrong in the first and right in the second."
    yield "pairs[].changed", "integer", "Rows with another prediction."


def _configurations() -> Iterator[tuple[str, str, str]]:
    """Yields the keys of a timed configuration."""
    path = "configurations[]"
    yield f"{path}.run", "text", "Letter of its run. Times of different runs were not measured in turns."
    yield f"{path}.variant", "text", "Id of its variant."
    yield f"{path}.precision", "text", "Its precision."
    yield f"{path}.float_precision", "text", "Precision of its layers that are not quantized."
    yield f"{path}.engine", "text", "Its engine."
    yield f"{path}.mode", "text", "The mode of its engine."
    yield f"{path}.device", "text", "`cpu` or `cuda`."
    yield f"{path}.threads", "integer", "Threads of the engine."
    yield f"{path}.batch", "integer", "Batch size."
    yield f"{path}.sequence", "integer", "Sequence length, tokens; null for rows of one size."
    yield f"{path}.p50_ms", "number", "Median latency, ms."
    yield f"{path}.p90_ms", "number", "90th percentile, ms."
    yield f"{path}.p99_ms", "number", "99th percentile, ms; null below 200 samples."
    yield f"{path}.throughput_per_s", "number", "Rows per second."
    yield f"{path}.speedup", "number", "Speed-up over the baseline in torch (fp32, eager) of the same run; null where that was not timed."
    yield f"{path}.busy", "boolean", "Whether other work on the machine spoiled its time, or the time of that reference."
    yield f"{path}.value", "number", "The primary metric of exactly this configuration."
    yield f"{path}.low", "number", "Lower end of its 95 % interval; null where only the value is known."
    yield f"{path}.high", "number", "Upper end of its 95 % interval."
    yield f"{path}.n", "integer", "Rows that it was computed from."
    yield f"{path}.role", "text", "`served`, `reference` (the baseline in torch) or `other`."
    yield f"{path}.front", "boolean", "Whether it is on the Pareto front of its run at this shape."
    yield f"{path}.joint_front", "boolean", "Whether it is on the front of all runs; always false where their metrics differ."


def _ledger() -> Iterator[tuple[str, str, str]]:
    """Yields the keys of a cell of the ledger."""
    yield "ledger[].run", "text", "Letter of a run."
    yield "ledger[].variant", "text", "Id of a variant of it."
    yield "ledger[].backend", "text", "torch, an engine, or triton."
    yield "ledger[].value", "number", "Primary metric in this backend; null if it was not measured."
    yield "ledger[].low", "number", "Lower end of its 95 % interval."
    yield "ledger[].high", "number", "Upper end of its 95 % interval."
    yield "ledger[].n", "integer", "Number of evaluated rows."
    yield "ledger[].groups", "integer", "Groups of rows that the interval is drawn over."
    yield "ledger[].in_train", "integer", "How many of the rows are trained on; null: none."
    yield "ledger[].interval_reason", "text", "Why there is no interval."
    yield "ledger[].reason", "text", "Why it was not measured."


KEYS: tuple[Key, ...] = tuple(
    Key(*row)
    for row in (
        ("schema", "integer", "Version of this layout: 1."),
        ("task", "text", "`model.task` of all recipes."),
        ("metric.name", "text", "Primary metric of the first run."),
        ("metric.higher_is_better", "boolean", "False for perplexity and error rates."),
        *_runs(),
        *_pairs(),
        *_configurations(),
        *_ledger(),
        ("recipe[].path", "text", "A key of the recipe whose value is not the same in all runs; a stage is named by its id."),
        ("recipe[].values.*", "map", "Its value by the letter of the run, defaults filled in; a run without the key is not listed."),
        ("machine[].name", "text", "What differs between the machines, such as `cpu`, `threads` or `versions.torch`."),
        ("machine[].values.*", "map", "Its value by the letter of the run; null where a run does not say."),
        ("timing", "text", "Why times of different runs are not divided by each other."),
    )
)
