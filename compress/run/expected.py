"""Splits the time of a step into parts, and predicts each part on this machine before any run was recorded.

    seconds = sum over parts of  amount * seconds of one

The amounts follow from the recipe, the data and the shapes of the model. What one takes comes from the speed of the machine
(`compress.run.pace`), and is corrected by earlier runs (`compress.run.durations`).

    start    1: loading libraries, model and rows
    products multiply-accumulates in torch (`Stage.work`), times 1 + (`SMALL` / width)^2: narrow products are bound by their overhead
    macs     multiply-accumulates of engines
    bytes    bytes that the step writes
    builds   graphs that export traces
    engines  engines, in each of their modes, that are built, evaluated and opened
    written  multiply-accumulates of the tokens that torch answers one after the other, in an export
    answered the same of engines
    sampled  seconds of samples, and of answers of the server, if the engines compute `REFERENCE_SPEED` multiply-accumulates a second
    served   models that a server is started with
    asked    rows that the server answers
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from compress.run.choose_buckets import Buckets
from compress.run.disk import Variant, default_builds
from compress.run.implicit import Evaluate, Latency, Source, shapes
from compress.run.pace import CALL_S
from export.builds import reads_graph
from export.cascade.cascade import Cascade
from export.export import Export
from export.parity.rows import GATE_PROMPTS, GATE_ROWS, GATE_TOKENS, OWN_PROMPTS, looks
from foundation.core.engines import ENGINES, REFERENCE
from foundation.measure.generation import workloads
from foundation.measure.race import BLOCKS
from foundation.models.config import most_tokens
from foundation.models.library import sizes_config
from foundation.schemes.int8 import has_vnni
from foundation.schemes.table import SCHEMES, is_static_int8
from foundation.stage.context import Context
from foundation.stage.stage import Stage
from triton_repo.client import LOAD_REQUESTS, LOAD_SECONDS
from triton_repo.triton_repo import TritonRepo

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODES = 1.5
"""Modes of an engine, on average: static and dynamic, or also with a 16-bit float part where the processor supports it."""


def parts_of(
    step: Stage,
    work: float,
    macs: float,
    config: PreTrainedConfig,
    padded: float,
    disk_bytes: int,
    variants: Mapping[str, Variant],
    context: Context,
) -> dict[str, float]:
    """Returns the amounts of a step.

    Args:
        step: The step.
        work: Its work in multiply-accumulates (`Stage.work`), of rows as long as they are padded to.
        macs: Multiply-accumulates of its model for one row.
        config: Transformers config of its model.
        padded: Mean length that rows are padded to, as a share of the longest.
        disk_bytes: Bytes that it writes, predicted.
        variants: The variants before it.
        context: Data and target.
    """
    if isinstance(step, Export | Latency | TritonRepo):
        planned = default_builds(variants, context)
        builds = len(planned)
        engines = builds * sum(engine != REFERENCE for engine in context.target.engines)
        if isinstance(step, Export):
            made = {"start": 1, "builds": builds * reads_graph(context), "bytes": disk_bytes}
            if context.facts.generates:
                checkpoints = len({id(variant) for _, variant in planned})  # one in a half is that of fp32
                return made | _answers(step, padded * macs, config, (builds, checkpoints), context)
            rows = len(context.data.evaluation) + min(GATE_ROWS, len(context.data.selection))
            return made | {"engines": MODES * engines, "macs": padded * MODES * engines * rows * macs}
        if isinstance(step, Latency):
            timed = 2 + MODES * engines
            sampled = {"start": 1, "engines": timed, "sampled": timed * _sampled_macs(macs, context)}
            return sampled | (_loads(macs, config, builds, context) if context.facts.generates else {})
        served = builds * step.serve * (context.target.device == "cpu")
        rows, call = len(context.data.evaluation), _call_s(padded * macs)
        answers = rows * call + len(step.concurrency) * min(LOAD_SECONDS, LOAD_REQUESTS * call)
        checked = served * (ANSWERED if context.facts.generates else 1)
        return {"start": 1, "served": checked, "asked": served * rows, "sampled": served * answers, "bytes": disk_bytes}
    if isinstance(step, Cascade):
        rows = len(context.data.selection) + (0 if context.data.certify is None else len(context.data.certify))
        return {"start": 1, "engines": TIERS, "macs": padded * macs * TIERS * rows, "products": work * _overhead(config)}
    if isinstance(step, Buckets):
        return {"start": 1, "engines": 1, "macs": 100.0 * macs * max(context.target.batch_sizes)}
    if isinstance(step, Source):
        return {"start": 1, "bytes": disk_bytes}
    evaluated = [*variants.values()][-1:] if isinstance(step, Evaluate) else []
    integers = any(one.quantizer is not None and is_static_int8(SCHEMES[one.quantizer.scheme].precision) for one in evaluated)
    return {"start": 1, "products": work * _overhead(config) * (INTEGER if integers and has_vnni() else 1.0)}


def _answers(step: Export, macs: float, config: PreTrainedConfig, made: tuple[int, int], context: Context) -> dict[str, float]:
    """Returns the amounts of an export whose engines answer rows and prompts, and torch with them.

    Args:
        step: The step.
        macs: Multiply-accumulates of its model for one row.
        config: Transformers config of its model.
        made: Builds, and checkpoints that they are of, which torch answers too.
        context: Data and target.
    """
    data, settings, names = context.data, step.generation, [name for name in context.target.engines if name != REFERENCE]
    builds, checkpoints = made
    answering = sum(ENGINES[name].generates is not None for name in names)
    engines = builds * (answering + MODES * (len(names) - answering))  # modes of those that answer are alternatives
    gate = data.selection if len(data.selection) else data.train
    rows = min(GATE_ROWS, len(gate))
    asked = min(rows, LOOKS * looks(rows, round(rows * gate.labels.count() / max(1, len(gate))))[0])
    held_out = settings.prompts if settings.questions is not None else min(settings.prompts, len(data.evaluation))
    gated = min(GATE_TOKENS, settings.tokens) * min(GATE_PROMPTS, settings.prompts)
    own = settings.tokens * min(OWN_PROMPTS, held_out)
    one = macs / max(1, context.max_length)
    return {
        "engines": engines,
        "macs": engines * (len(data.evaluation) + asked) * macs,
        "products": WAYS * checkpoints * asked * macs * _overhead(config),
        "written": (answering > 0) * (settings.tokens * held_out + gated + (checkpoints - 1) * (own + gated)) * one * _overhead(config),
        "answered": builds * answering * (settings.tokens * held_out + gated) * one,
    }


def _loads(macs: float, config: PreTrainedConfig, builds: int, context: Context) -> dict[str, float]:
    """Returns the amounts of the loads under which engines that answer are timed.

    Args:
        macs: Multiply-accumulates of a row.
        config: Transformers config of the model.
        builds: Builds.
        context: Data and target.
    """
    engines = builds * sum(ENGINES[name].generates is not None for name in context.target.engines)
    loads = workloads(most_tokens(config))
    read = sum((load.turns + 1) * load.streams * load.prompt_tokens for load in loads)
    written = sum(load.turns * max(load.streams, TOGETHER) * load.tokens for load in loads)
    one = macs / max(1, context.max_length)
    return {"macs": engines * read * one, "answered": engines * written * one}


def _overhead(config: PreTrainedConfig) -> float:
    """Returns how many times longer the products of a model take than wide ones of as many multiply-accumulates."""
    width = getattr(sizes_config(getattr(config, "text_config", config)), "hidden_size", None) or SMALL
    return 1.0 + (SMALL / width) ** 2


def _sampled_macs(macs: float, context: Context) -> float:
    """Returns the seconds of samples at all shapes in one engine that computes `REFERENCE_SPEED` multiply-accumulates a second."""
    total = 0.0
    for batch, length in shapes(context.task, context.target):
        share = 1.0 if length is None or not context.max_length else min(1.0, length / context.max_length)
        call = _call_s(macs * batch * share)
        blocks = [max(block.least * call, min(block.seconds, block.most * call)) for block in BLOCKS]
        total += max(WARM_UP_S, WARM_UP_CALLS * call) + sum(blocks) + MORE_TURNS * blocks[-1]
    return total


def _call_s(macs: float) -> float:
    """Returns the seconds of a call in such an engine."""
    return CALL_S + macs / REFERENCE_SPEED


TIERS = 3
"""Engines that a cascade asks, on average: builds that it compares, and the original."""
WARM_UP_CALLS, WARM_UP_S = 5, 0.15
"""What the warm-ups of all turns at a shape take at least."""
MORE_TURNS = 1.0
"""Turns that a shape takes beyond those of the race, on average on a quiet machine, because its figures are not close enough yet."""
TOGETHER = 4
"""Streams below which a step of an engine takes no less time: it reads all weights for each token."""
SMALL = 300.0
"""Width at which the products of a model take twice as long as their multiply-accumulates say."""
INTEGER = 0.5
"""Time of a product of int8 codes in torch over one in float32, on a processor with VNNI."""
ANSWERED = 4.0
"""How much longer a served model of a language model takes, which is asked prompt by prompt."""
LOOKS = 1.5
"""Rows that the gate of predictions asks, over those of its first look, on average over float and quantized builds."""
WAYS = 1.5
"""How often torch answers them: in its own way, and for some builds with the rounding of an engine and in float."""
REFERENCE_SPEED = 3.5e10
"""Multiply-accumulates per second of an engine on two cores; earlier runs correct it."""
