"""Predicts the memory of a served model on each device, and how to divide it over several.

Bytes on one of t devices that share each layer (tensor parallelism, Megatron: https://arxiv.org/abs/1909.08053), e that have whole experts
of a mixture each (e = t where they are divided with the matrices), and have the layers of one stage of a pipeline, for weights of b bytes:

    weights  = sum over layers of b (matrices / t + experts / e) + scales + 2 rest
               first stage: + 2 words / t + 2 (other tables and norms before the layers)
               last stage:  + 2 head / t + 2 (norms, poolers and classifiers after them)
    cache    = sum over layers of 2 heads_kv' d * bytes * tokens      heads_kv' = max(1, heads_kv / t); tokens of a device's answers at once
    work     = 2 bytes * tokens of a batch * (4 hidden + 2 intermediate / t), and in the last stage 4 bytes a logit of a language model

Stages are as in vLLM (`get_pp_indices`): as many layers each; layers left over go to stages from the last but one on backwards. Where
head and words are one table, both ends have it. The device that takes most counts, and all of it has to fit into 0.9 of the memory. Scales
are 4 bytes for each output of int8, 2 bytes for each group of 128 weights of int4.

What is chosen, the first that fits and meets the latency:

    replicas   each device holds the whole model: no traffic between them, so that rows a second grow with the devices
    tensor     t devices share each layer, where the link is NVLink: two all-reduces in every layer would wait for PCIe
    pipeline   p devices hold some layers each: little traffic, but one request is no faster

Experts of mixtures are divided with the matrices; where their number divides by t, whole experts are placed on each device (expert
parallelism, GShard: https://arxiv.org/abs/2006.16668), which sends tokens to them instead of adding up parts. Where t does not divide the
attention heads but the experts, only the experts are distributed: each device has all other weights and serves its own answers (t = 1, e
devices). vLLM calls that data parallel attention with expert parallelism.

A time is shown where the memory bandwidth is known. A token, or a batch of one row, reads every weight once (in a mixture only the chosen
experts, in a table only one row). So it takes at least the bytes read on one device / bandwidth. Pipelines do not divide this time.

Not counted: CUDA graphs, and buffers of NCCL; the tenth that is left free is for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from compress.devices.spec import Devices, shown_bytes
from compress.devices.weights import Block, Weights, weights_of
from foundation.models.config import num_experts
from foundation.models.library import sizes_config
from foundation.models.own_shape import SHAPE_KEY, read_own

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Precision = Literal["fp16", "int8", "int4"]
BITS: dict[Precision, int] = {"fp16": 16, "int8": 8, "int4": 4}
GROUP = 128
BATCH_TOKENS = 8192
"""Tokens that a language model reads at once; longer prompts are cut into such chunks. vLLM's default for online serving on large
devices."""


@dataclass(frozen=True)
class Load:
    """The load that the model serves."""

    streams: int
    """Answers of a language model at once, or rows of a batch."""
    length: int
    """Tokens of each, prompt and answer together."""
    latency_ms: float | None = None
    """The most that a token, or a batch of one row, may take; None: no limit."""


@dataclass(frozen=True)
class Model:
    """A model to serve."""

    config: PreTrainedConfig
    """Its Transformers config."""
    precision: Precision
    """Bytes of the matrices of its blocks."""
    generates: bool
    """Whether it is a language model, which keeps keys and values."""


@dataclass(frozen=True)
class Bytes:
    """Bytes on each device."""

    weights: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.cache + self.work


@dataclass(frozen=True)
class Division:
    """The division of a model over devices."""

    replicas: int
    tensor: int = 1
    pipeline: int = 1
    experts: int = 1
    """Devices over which whole experts are dealt out; 1 where there are none, or each is divided."""

    @property
    def devices_per_stage(self) -> int:
        """Devices over which the matrices of a layer, or its experts, are divided."""
        return max(self.tensor, self.experts)

    @property
    def devices(self) -> int:
        """Devices of one replica."""
        return self.devices_per_stage * self.pipeline

    def __str__(self) -> str:
        parts = [f"{self.replicas} replica{'s' * (self.replicas != 1)} of {self.devices} device{'s' * (self.devices != 1)}"]
        parts += [f"{name} parallel over {count}" for name, count in (("tensor", self.tensor), ("pipeline", self.pipeline)) if count > 1]
        parts += [f"expert parallel over {self.experts}"] * (self.experts > 1)
        return ", ".join(parts)


@dataclass(frozen=True)
class Plan:
    """The chosen division, and why."""

    division: Division | None
    """None where the model does not fit."""
    bytes: Bytes
    """On each device of the chosen division, or of the one that comes nearest to fit."""
    floor_ms: float | None
    """The least time of a token or of a batch of one row; None: the bandwidth is unknown."""
    reasons: tuple[str, ...]
    """One sentence for each decision."""


def plan(model: Model, load: Load, devices: Devices) -> Plan:
    """Chooses how a model is served on some devices.

    Args:
        model: The model.
        load: What it is asked for.
        devices: The devices.
    """
    weights, reasons = weights_of(model.config), []
    whole = bytes_on_each(model, weights, load, Division(devices.count))
    fits = whole.total <= devices.usable
    reasons.append(
        f"one device {'holds' if fits else 'does not hold'} the model: {shown_bytes(whole.total)} of {shown_bytes(devices.usable)} usable "
        f"(weights {shown_bytes(whole.weights)}, keys and values {shown_bytes(whole.cache)}, work {shown_bytes(whole.work)})"
    )
    best: Plan | None = None
    for division in divisions(model, devices):
        needed = bytes_on_each(model, weights, load, division)
        floor = floor_ms(model, weights, division, devices)
        late = floor is not None and load.latency_ms is not None and floor > load.latency_ms
        made = Plan(division, needed, floor, ())
        if needed.total > devices.usable:
            best = best or made
            continue
        if not late:
            return Plan(division, needed, floor, (*reasons, *_why(division, fits, devices, load, floor)))
        reasons.append(f"{division}: a step takes at least {floor:.2f} ms, more than the {load.latency_ms:g} ms that are asked for")
        best = made if best is None or best.bytes.total > devices.usable else best
    nearest = best or Plan(None, whole, None, ())
    if nearest.bytes.total > devices.usable:
        reasons.append(_smaller(model, weights, load, devices))
        return Plan(None, nearest.bytes, nearest.floor_ms, tuple(reasons))
    return Plan(nearest.division, nearest.bytes, nearest.floor_ms, (*reasons, "no division meets the latency; this is the nearest"))


def divisions(model: Model, devices: Devices) -> Iterator[Division]:
    """Yields the divisions that the model and the link allow, the one to prefer first."""
    yield Division(devices.count)
    sizes, experts = sizes_config(model.config), num_experts(model.config)
    if devices.link == "nvlink":
        for tensor in range(2, devices.count + 1):
            whole = tensor if experts and experts % tensor == 0 else 1
            divides = sizes.num_attention_heads % tensor == 0
            if devices.count % tensor == 0 and (divides or whole > 1):
                yield Division(devices.count // tensor, tensor if divides else 1, experts=whole)
        return
    for pipeline in range(2, min(devices.count, sizes.num_hidden_layers) + 1):
        if devices.count % pipeline == 0:
            yield Division(devices.count // pipeline, pipeline=pipeline)


def bytes_on_each(model: Model, weights: Weights, load: Load, division: Division) -> Bytes:
    """Returns the bytes on the fullest device of a division; see the top of this file."""
    sizes = sizes_config(model.config)
    hidden, heads = int(sizes.hidden_size), int(sizes.num_attention_heads)
    answers = -(-load.streams * division.tensor // division.devices_per_stage)  # of a device: all devices of a tensor group share them
    tokens = min(BATCH_TOKENS, answers * load.length) if model.generates else answers * load.length
    inner = int(getattr(sizes, "intermediate_size", None) or getattr(sizes, "n_inner", None) or 4 * hidden)
    work = 2 * tokens * (4 * hidden + 2 * inner / division.tensor)
    keys = _keys_of_layers(model.config, len(weights.blocks))
    width = int(getattr(sizes, "head_dim", None) or hidden // heads)
    found: list[Bytes] = []
    for span in stages(len(weights.blocks), division.pipeline):
        logits = 4 * answers * int(model.config.vocab_size) if model.generates and span.stop == len(weights.blocks) else 0
        own = stage_bytes(weights, span, model.precision, division)
        held = sum(max(1, count / division.tensor) for count in keys[span.start : span.stop])
        copied = held - sum(keys[span.start : span.stop]) / division.tensor  # where more devices share a layer than it has heads of keys
        own += 2 * copied * width * hidden * BITS[model.precision] / 8
        cache = 2 * held * width * 2 * answers * load.length * model.generates
        found.append(Bytes(round(own), round(cache), round(work + logits)))
    return max(found, key=lambda each: each.total)


def _keys_of_layers(config: PreTrainedConfig, layers: int) -> tuple[int, ...]:
    """Returns the number of heads of keys in each layer."""
    sizes, own = sizes_config(config), getattr(config, SHAPE_KEY, None)
    if own is not None:
        return read_own(own, layers, "model").key_value_heads
    return (int(getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads),) * layers


def stages(layers: int, count: int) -> list[range]:
    """Returns the layers of each stage of a pipeline, as vLLM divides them."""
    many, left = divmod(layers, count)
    sizes = [many + (count - 1 - left <= stage < count - 1) for stage in range(count)]
    return [range(sum(sizes[:stage]), sum(sizes[: stage + 1])) for stage in range(count)]


def stage_bytes(weights: Weights, span: range, precision: Precision, division: Division) -> float:
    """Returns the bytes of the weights on a device of one stage."""
    blocks = sum((weights.blocks[number] for number in span), Block())
    matrices, experts = packed_bytes(blocks, precision)
    first, last = span.start == 0, span.stop == len(weights.blocks)
    divided = first * weights.words + last * weights.head - (first and last and weights.tied) * weights.head
    whole = blocks.rest + first * (weights.tables + weights.before) + last * weights.behind
    return (matrices + 2 * divided) / division.tensor + experts / division.devices_per_stage + 2 * whole


def packed_bytes(blocks: Block, precision: Precision) -> tuple[float, float]:
    """Returns the bytes of matrices, and the bytes of experts, in a precision, with their scales."""

    def packed(many: int, rows: int) -> float:
        scales = {"fp16": 0.0, "int8": 4.0 * rows, "int4": 2.0 * many / GROUP}[precision]
        return many * BITS[precision] / 8 + scales

    return packed(blocks.matrices, blocks.rows), packed(blocks.experts, blocks.expert_rows)


def floor_ms(model: Model, weights: Weights, division: Division, devices: Devices) -> float | None:
    """Returns the least time in ms of a token, or of a batch of one row, which is the time to read the weights; None without a
    bandwidth."""
    if devices.bandwidth is None:
        return None
    return 1e3 * bytes_read(model, weights, division) / devices.bandwidth


def bytes_read(model: Model, weights: Weights, division: Division) -> float:
    """Returns the fewest bytes of weights that a device reads for a token, or for a batch of one row: all of them once, of tables a row."""
    experts, chosen, blocks = num_experts(model.config), num_chosen(model.config), weights.whole
    matrices, of_experts = packed_bytes(blocks, model.precision)
    read = (matrices + 2 * weights.head) / division.tensor
    if experts:
        read += of_experts * chosen / experts / division.devices_per_stage
    return read + 2 * (blocks.rest + weights.entries + weights.before + weights.behind)


def num_chosen(config: PreTrainedConfig) -> int:
    """Returns how many experts a token is sent to."""
    return int(getattr(config, "num_experts_per_tok", None) or 1)


def _why(division: Division, fits: bool, devices: Devices, load: Load, floor: float | None) -> Iterator[str]:
    if division.experts > 1:
        yield f"whole experts lie on each of {division.experts} devices, and tokens are sent to them"
    if division.devices == 1:
        yield (
            f"so each of the {devices.count} devices serves all of it: rows a second grow with the devices"
            if devices.count > 1
            else "so it serves"
        )
    elif division.tensor > 1:
        reason = "a step would take too long on fewer" if fits else "fewer do not hold it"
        yield f"{division.tensor} devices share each layer, as {reason}; NVLink carries the two sums of every layer"
    elif division.pipeline > 1:
        yield f"{division.pipeline} devices hold some layers each: PCIe is too slow to add up every layer over it (tensor parallelism)"
    if division.experts > division.tensor:
        yield f"each holds all of the rest, as {division.experts} does not divide the attention heads, and reads answers of its own"
    if floor is not None:
        asked = "" if load.latency_ms is None else f" (asked: {load.latency_ms:g} ms)"
        yield f"a step takes at least {floor:.2f} ms, the time of reading the weights{asked}"


def _smaller(model: Model, weights: Weights, load: Load, devices: Devices) -> str:
    """Describes the precision in which the model would fit, if any."""
    for precision in ("int8", "int4"):
        if BITS[precision] < BITS[model.precision]:
            other = Model(model.config, precision, model.generates)
            for division in divisions(other, devices):
                if bytes_on_each(other, weights, load, division).total <= devices.usable:
                    return f"it does not fit in {model.precision}; in {precision} it would: {division}"
    return f"it fits on none of these devices in {model.precision} or below: take more of them, or larger ones, or fewer streams"
