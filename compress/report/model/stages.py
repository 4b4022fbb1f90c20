"""Figures of the stages that the page shows, as far as it shows them; report.json holds all that a stage returned."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from foundation.artifacts.document import Document, Number


class LayerNoise(Document):
    """A quantized layer."""

    name: str = "unnamed"
    """Its name."""
    input_sqnr_db: Number | None = None
    """Signal-to-quantization-noise ratio of its inputs, dB."""
    weight_sqnr_db: Number | None = None
    """The same ratio of its weights."""


class LayerGain(Document):
    """The error that a layer causes in int8, in units of the scan."""

    name: str = "unnamed"
    """Its name."""
    gain: Number = 0.0
    """Error that the layer saves in float."""
    alone: Number = 0.0
    """The error if it alone is quantized."""
    weights: Number = 0.0
    """The same, of its weights."""
    inputs: Number = 0.0
    """The same, of its inputs."""


class LayerScan(Document):
    """The sensitivity of every layer."""

    measure: str | None = None
    """Unit of the errors, such as `kl`."""
    layers: tuple[LayerGain, ...] = ()
    """The layers, in scan order."""


class Attempt(Document):
    """A quantization that was tried."""

    name: str = "unnamed"
    """Its name."""
    value: Number | None = None
    """Its loss."""
    seconds: Number | None = None
    """How long it took."""
    kept: bool = False
    """Whether it was chosen."""


class Quantization(Document):
    """Figures of the stage `quantize`."""

    layers: tuple[LayerNoise, ...] = ()
    """The quantized layers."""
    sensitivity: LayerScan = LayerScan()
    """Where the layers were scanned."""
    attempts: tuple[Attempt, ...] = ()
    """Where several methods were tried."""
    experts: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """Calibration tokens that each expert reads, by layer of experts; padding counts."""
    dropped_tokens: dict[str, int] = Field(default_factory=dict)
    """Calibration tokens that no expert has room for, by layer of experts."""


class Sizes(Document):
    """Dimensions of a model; a number for each block where they differ between blocks."""

    hidden: int | None = None
    """Channels of the residual stream."""
    vocabulary: int | None = None
    """Tokens of the vocabulary."""
    heads: tuple[int, ...] = ()
    """Attention heads."""
    ffn: tuple[int, ...] = ()
    """Neurons."""
    experts: tuple[int, ...] = ()
    """Experts."""
    tokens: tuple[Number, ...] = ()
    """Share of the tokens that each block passes on, where tokens are pruned."""
    merged: bool = False
    """Whether the other tokens merge with these instead of being dropped."""
    first_stays: bool = False
    """Whether the first token never merges, since the head reads it alone."""
    embedding_rank: int = 0
    """Rank of the embeddings of tokens; 0 for a plain table."""

    @property
    def components(self) -> Mapping[str, tuple[int, ...]]:
        """The numbers that can differ between blocks, by name."""
        return {"heads": self.heads, "ffn": self.ffn, "experts": self.experts}


class Change(Document):
    """A number before and after pruning."""

    before: Number | None = None
    """Before."""
    after: Number | None = None
    """After."""


class ComponentScan(Document):
    """Cost of removing shares of one component of a block: (share, distance or metric) for each share."""

    name: str = ""
    """The layer that the component feeds."""
    what: str = ""
    """A key of `Sizes.components`."""
    distances: tuple[tuple[float, float], ...] = ()
    """Distance of the answers."""
    metrics: tuple[tuple[float, float], ...] = ()
    """Primary metric, where it was measured."""


class PruningScan(Document):
    """The sensitivity of every component."""

    measure: str | None = None
    """Unit of the distances."""
    rows: int | None = None
    """Rows of the scan."""
    metric: str | None = None
    """Name of the primary metric, where it was measured."""
    whole: Number | None = None
    """Its value for the unpruned model."""
    layers: tuple[ComponentScan, ...] = ()
    """The components."""


class Look(Document):
    """The metric of a selection split during a training."""

    step: int | None = None
    """Step of the training."""
    value: Number = 0.0
    """The metric."""


class Trained(Document):
    """A training of the stage `prune`."""

    losses: tuple[dict[str, Number], ...] = ()
    """For each epoch `epoch`, `loss` and the parts of the loss."""
    selection: tuple[Look, ...] = ()
    """The metric on the selection split."""
    best_step: int | None = None
    """The step whose weights were taken."""
    steps: int | None = None
    """Steps of the training."""
    sparsity: Number | None = None
    """Share that learned gates leave."""


class Iteration(Trained):
    """One iteration of pruning and, if there was any, the training that followed."""

    share: Number | None = None
    """Share that is removed after it."""
    learned: Trained | None = None
    """The training of the masks, where they were learned."""


class Timed(Document):
    """Predicted and measured latency of a model."""

    predicted_ms: Number = 0.0
    """By the table."""
    measured_ms: Number = 0.0
    """In the engine."""
    speedup: Number | None = None
    """How many times faster than before, or than the first model of a family."""


class Counts(Document):
    """Latency that a component adds, by its number."""

    counts: tuple[Number, ...] = ()
    """Heads or neurons of a block."""
    ms: tuple[Number, ...] = ()
    """Latency that they add, ms."""


class LatencyTable(Document):
    """The measured latency table."""

    engine: str | None = None
    """Engine that was timed."""
    precision: str | None = None
    """Its precision."""
    batch: int = 1
    """Batch size."""
    sequence: int | None = None
    """Sequence length; null for images."""
    rest_ms: Number | None = None
    """Latency outside the blocks."""
    block_ms: Number | None = None
    """Latency of an empty block."""
    heads: Counts = Counts()
    """Attention heads."""
    ffn: Counts = Counts()
    """Neurons."""
    asked_ms: Number | None = None
    """The latency that was aimed at."""
    reference_ms: Number | None = None
    """With `over`: latency of the model that the speed-up refers to."""
    before: Timed | None = None
    """The unpruned model."""
    rounds: tuple[Timed, ...] = ()
    """The pruned model of each round."""
    after: Timed | None = None
    """The pruned model that was taken."""


class ExpertLoads(Document):
    """Share of the tokens that each expert of each block reads; empty for blocks without experts."""

    before: tuple[tuple[float, ...], ...] = ()
    """Before pruning."""
    after: tuple[tuple[float, ...], ...] = ()
    """After it."""


class EmbeddingFigures(Document):
    """Embeddings of tokens in low rank."""

    rank: int
    """Their rank."""
    relative_error: Number | None = None
    """Norm of what they lost, relative to the norm of the table, both weighted by the tokens of the train rows."""
    parameters: Change = Change()
    """Their parameters."""


class Pruning(Document):
    """Figures of the stage `prune`."""

    method: str | None = None
    """`prune.method`."""
    measure: str | None = None
    """Unit of `sparsity`."""
    sparsity: Number | None = None
    """Share that was removed."""
    cost: Change = Change()
    """The cost of the blocks, in `measure`."""
    before: Sizes | None = None
    """Dimensions before."""
    after: Sizes = Sizes()
    """Dimensions after."""
    layers: tuple[int, ...] = ()
    """Blocks of the unpruned model that are left, where some are gone."""
    steps: tuple[Iteration, ...] = ()
    """The iterations."""
    sensitivity: PruningScan = PruningScan()
    """Where components were scanned."""
    latency: LatencyTable | None = None
    """Where latency was the measure."""
    loads: ExpertLoads = ExpertLoads()
    """Where the model has experts."""
    embeddings: EmbeddingFigures | None = None
    """Where the embeddings got a lower rank."""

    def places(self, num_blocks: int) -> dict[int, int]:
        """Returns the number of each block that is left, by its number in the unpruned model of `num_blocks` blocks."""
        return {block: number for number, block in enumerate(self.layers or range(num_blocks))}


class SparseLayer(Document):
    """A layer with zeros."""

    name: str = "unnamed"
    """Its name."""
    sparsity: Number | None = None
    """Share of zeros."""
    blocks: int | None = None
    """Blocks of the pattern."""
    zero_blocks: int = 0
    """Blocks that are zero."""
    outputs: int | None = None
    """Outputs that are zero."""
    inputs: int | None = None
    """Inputs that are zero."""


class Groups(Document):
    """Root mean squares of the groups of the group lasso, as quantiles by layer."""

    metric: str | None = None
    """The metric of the groups; absent in earlier runs."""
    quantiles: tuple[float, ...] = ()
    """The quantiles that are listed."""
    before: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """Before training with the penalty."""
    after: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """After it."""


class Unread(Document):
    """Heads and neurons that no layer reads any more."""

    heads: int | None = None
    """Heads; null if unknown."""
    neurons: int | None = None
    """Neurons."""


class Sparsity(Document):
    """Figures of the stage `sparsify`."""

    method: str | None = None
    """`sparsify.method`."""
    pattern: str | None = None
    """The pattern of the zeros."""
    sparsity: Number | None = None
    """Share of zeros."""
    asked: Number | None = None
    """The share that was aimed at; with a speed-up, the share that the measured shape needs."""
    latency: LatencyTable | None = None
    """Where a speed-up was asked for: the latency table, and the compacted shapes that were timed."""
    layers: tuple[SparseLayer, ...] = ()
    """The layers."""
    groups: Groups = Groups()
    """The groups of the lasso."""
    unread: Unread = Unread()
    """Heads and neurons without effect."""
    speed: str = ""
    """Gain of the pattern in an engine."""


class Disconnected(Document):
    """Units that zeros have disconnected."""

    heads: int = 0
    """Heads, in groups that share keys and values."""
    neurons: int = 0
    """Neurons."""


class Compaction(Document):
    """Figures of the stage `compact`."""

    unread: Disconnected = Disconnected()
    """Units removed because nothing reads them."""
    constant: Disconnected = Disconnected()
    """Units removed because their value is a constant, which is now part of a bias."""
    before: Sizes = Sizes()
    """Dimensions before."""
    after: Sizes = Sizes()
    """Dimensions after."""
    zeros: Change = Change()
    """Share of zeros in the linear layers of the blocks."""
    parameters: Change = Change()
    """Parameters of the model."""
    difference: Number | None = None
    """Largest absolute difference of an output."""
    seconds: Number | None = None
    """Time of the compaction."""


class TrainedAdapter(Document):
    """Figures of the stage `adapters` of one adapter."""

    rows: int = 0
    """Train rows."""
    parameters: int = 0
    """Trained parameters."""
    difference: Number | None = None
    """Largest difference of a logit to the model that the adapter was merged into; null without selection rows."""


class Operation(Document):
    """An operation of a profiled training."""

    name: str | None = None
    """Its name."""
    share: Number = 0.0
    """Share of the time of all operations."""
    calls: int = 0
    """How often it ran."""


class Profile(Document):
    """The profile of a training (`foundation.training.profile`)."""

    label: str | None = None
    """The training."""
    device: str | None = None
    """`cpu` or `cuda`."""
    precision: str | None = None
    """Precision of the products."""
    processes: int = 1
    """Its processes."""
    timed_steps: int | None = None
    """Steps that were timed."""
    step_ms: Number | None = None
    """Time of a step."""
    rows_per_s: Number | None = None
    """Rows per second."""
    tokens_per_s: Number | None = None
    """Tokens per second."""
    padding_share: Number | None = None
    """Share of padding tokens."""
    utilisation: Number | None = None
    """Model FLOPs utilisation."""
    gemm_flops_per_s: Number | None = None
    """Speed of a large product on this machine."""
    communication_share: Number | None = None
    """Share of a step in which processes communicate."""
    peak_bytes: int | None = None
    """Peak memory of torch."""
    memory: tuple[tuple[float, float], ...] = ()
    """(ms, bytes) by time."""
    operations: tuple[Operation, ...] = ()
    """The operations with the most time of their own."""
    trace: str | None = None
    """File of the trace."""
