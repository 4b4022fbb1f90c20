"""The meaning of every key of `search.json`: the source of the reference page; a test checks it against real searches.

Paths are written as in `compress.report.keys`; `OBJECTIVE` stands for `metric`, `latency`, `size` or `throughput`, `GOAL` for a goal.
"""

from __future__ import annotations

from collections.abc import Iterator

from compress.report.keys import Key


def _served(path: str, what: str) -> Iterator[tuple[str, str, str]]:
    yield f"{path}.variant", "text", f"Id of the variant that {what} serves; all keys are null where no engine was built."
    yield f"{path}.precision", "text", "Its precision."
    yield f"{path}.float_precision", "text", "Precision of its layers that are not quantized."
    yield f"{path}.engine", "text", "Its engine."
    yield f"{path}.mode", "text", "The mode of its engine."


def _point(path: str) -> Iterator[tuple[str, str, str]]:
    """Yields the keys of a point of the front."""
    yield f"{path}.number", "integer", "Number of its candidate."
    yield f"{path}.name", "text", "Its name, of recipe and run."
    yield f"{path}.values.*", "map", "Value of each knob by its path."
    yield f"{path}.recipe", "text", "Its recipe, relative to the search folder: `compress run` takes it."
    yield f"{path}.run", "text", "Its run on the evaluation split, relative to the search folder."
    yield f"{path}.selection.OBJECTIVE", "number", "An objective on selection rows, as in `candidates[].results`."
    yield f"{path}.evaluation.metric.value", "number", "The primary metric of what is served, on the evaluation split."
    yield f"{path}.evaluation.metric.low", "number", "Lower end of its 95 % interval."
    yield f"{path}.evaluation.metric.high", "number", "Upper end of its 95 % interval."
    yield f"{path}.evaluation.metric.n", "integer", "Rows that it was computed from."
    yield (
        f"{path}.evaluation.latency",
        "number",
        "Time that the served one was chosen by, ms: see `target.serve`; null where no engine ran.",
    )
    yield f"{path}.evaluation.size", "integer", "Bytes that the engine of what is served loads; null where none was built."
    yield f"{path}.evaluation.throughput", "number", "Rows per second of what is served, at its best shape; null where no engine ran."
    yield f"{path}.evaluation.drop.value", "number", "What it lost of the primary metric against the baseline in torch."
    yield f"{path}.evaluation.drop.low", "number", "Lower end of the 95 % interval of the drop."
    yield f"{path}.evaluation.drop.high", "number", "Upper end of the 95 % interval of the drop."
    yield f"{path}.evaluation.speedup", "number", "Speed-up over torch, as `min_speedup` is judged by; null where it was not measured."
    yield from _served(f"{path}.served", "the point")
    yield f"{path}.goals[].*", "map", "A judged goal: the keys of `goals[]` of `report.json`."
    yield f"{path}.missed[]", "text", "Goals that it misses on the evaluation split, `int8_faster` left out."


KEYS: tuple[Key, ...] = tuple(
    Key(*row)
    for row in (
        ("schema", "integer", "Version of this layout: 1."),
        ("name", "text", "`name` of the recipe."),
        ("task", "text", "`model.task` of the recipe."),
        ("environment.cpu", "text", "Processor."),
        ("environment.cpu_features[]", "text", "Instruction sets that matter for int8 and bf16, such as `avx512_vnni`."),
        ("environment.cores", "integer", "Physical cores that the search may use."),
        ("environment.memory_bytes", "integer", "Memory of the machine, bytes."),
        ("environment.gpus[]", "text", "NVIDIA GPUs."),
        ("environment.kernel", "text", "Linux kernel."),
        ("environment.versions.PACKAGE", "text", "Version of a library that affects the figures."),
        ("metric.name", "text", "Primary metric."),
        ("metric.higher_is_better", "boolean", "False for perplexity and error rates."),
        ("objectives[]", "text", "`search.objectives`: what the front is made of."),
        ("goals.*", "map", "`goals` of the recipe, those that are set or have a default."),
        ("budget.trials", "integer", "`search.budget.trials`."),
        ("budget.hours", "number", "`search.budget.hours`; null: no limit."),
        ("halving.wave", "integer", "`search.halving.wave`."),
        ("halving.keep", "number", "`search.halving.keep`."),
        ("halving.short", "number", "`search.halving.short`."),
        ("rows.selection", "integer", "Rows that candidates are judged on."),
        ("rows.evaluation", "integer", "Rows that the front alone is judged on, once."),
        ("space[].path", "text", "A knob: the path of the setting in the recipe."),
        ("space[].kind", "text", "range or choices."),
        ("space[].choices[].*", "any", "Its values, of choices."),
        ("space[].low", "number", "Smallest value, of a range."),
        ("space[].high", "number", "Largest value, of a range."),
        ("space[].step", "number", "Step between the values, of a range that has one."),
        ("space[].log", "boolean", "Whether the values of a range are drawn by their logarithm."),
        ("combinations", "integer", "Number of combinations of all knobs; null where a range has any number."),
        ("rungs[].name", "text", "A step that candidates are judged in, cheapest first: size, latency, untrained, short or full."),
        ("rungs[].about", "text", "What is done in it."),
        ("rungs[].left_out", "text", "Why it does not apply to this recipe; null where it does."),
        ("seconds", "number", "Seconds of work on the baseline and on candidates, of all processes and starts together."),
        ("baseline.metric", "number", "The primary metric of the baseline on selection rows, in torch."),
        ("candidates[].number", "integer", "Number of a candidate, from 0."),
        ("candidates[].name", "text", "Name of its folder in `trials`."),
        ("candidates[].wave", "integer", "Its wave: candidates of one are drawn together and compared with each other."),
        ("candidates[].own", "boolean", "Whether it has the values of the recipe itself."),
        ("candidates[].values.*", "map", "Value of each knob by its path."),
        ("candidates[].state", "text", "finished; dropped; or open, where the budget was used up before it was decided."),
        ("candidates[].front", "boolean", "Whether it is on the front."),
        ("candidates[].dropped.rung", "text", "The step in which it was dropped; `dropped` is null where it was not."),
        ("candidates[].dropped.reason", "text", "Why, in words."),
        ("candidates[].rungs.RUNG.seconds", "number", "Seconds that a step took; only the steps that it came to are there."),
        ("candidates[].rungs.RUNG.failed", "text", "Why the step failed; the candidate is dropped. Its other keys are then absent."),
        ("candidates[].rungs.size.macs", "integer", "Predicted multiply-accumulates of the last model."),
        ("candidates[].rungs.size.parameters", "integer", "Predicted parameters of the last model."),
        ("candidates[].rungs.size.weight_bytes", "integer", "Predicted bytes of its weights."),
        ("candidates[].rungs.size.predicted_seconds", "number", "Predicted seconds of its whole run; null where they cannot be."),
        ("candidates[].rungs.latency.relative", "number", "Geometric mean over the shapes of its time / time of the baseline there."),
        ("candidates[].rungs.latency.shapes[].batch", "integer", "Batch of a shape of the target."),
        ("candidates[].rungs.latency.shapes[].sequence", "integer", "Tokens of the shape; null for images."),
        ("candidates[].rungs.latency.shapes[].engine", "text", "The engine with the least time."),
        ("candidates[].rungs.latency.shapes[].time_ms", "number", "Its time, ms."),
        ("candidates[].rungs.latency.shapes[].baseline_ms", "number", "Least time of the baseline's shape, ms, measured in turns with it."),
        ("candidates[].rungs.untrained.metric", "number", "The primary metric without training, on selection rows, in torch."),
        ("candidates[].rungs.untrained.told", "boolean", "Whether that is near enough to the baseline to compare candidates by it."),
        ("candidates[].rungs.short.metric", "number", "The primary metric after short training, on selection rows, in torch."),
        ("candidates[].rungs.full.results.OBJECTIVE", "number", "The figures of `candidates[].results`, also those that are no objective."),
        ("candidates[].rungs.full.phase", "number", "How many times slower the machine was than when the baseline ran."),
        ("candidates[].rungs.full.excess.GOAL", "number", "How far it is beyond the limit of a goal; at most 0 where it meets it."),
        ("candidates[].rungs.full.missed[]", "text", "Goals that it misses, `int8_faster` left out."),
        *_served("candidates[].rungs.full.served", "it"),
        (
            "candidates[].results.OBJECTIVE",
            "number",
            "`metric`, `latency` (ms), `size` (bytes) and `throughput` (rows per second) of what it would serve, on selection rows, at the "
            "speed "
            "of the machine when the baseline ran; `results` is null where it has not finished.",
        ),
        ("candidates[].missed[]", "text", "Goals that it misses; empty where it has not finished."),
        ("candidates[].feasible", "boolean", "Whether it has finished and meets the goals on selection rows."),
        ("candidates[].seconds", "number", "Seconds that it took in all."),
        ("candidates[].run", "text", "Its full run, relative to the search folder; null where it has not finished."),
        (
            "importances.OBJECTIVE.*",
            "map",
            "By knob: the share of the variance of an objective that it explains (fANOVA); null for fewer than four finished candidates.",
        ),
        (
            "meets_goals",
            "boolean",
            "Whether the points of the front meet the goals on selection rows; else they are those that come nearest.",
        ),
        *_point("front[]"),
        *_point("recommended"),
        ("recommended.reason", "text", "Why this point of the front is recommended; `recommended` is null where nothing has finished."),
    )
)
