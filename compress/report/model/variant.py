"""A variant in report.json: its sizes, its accuracy and latency in every backend, and how its engines differ from torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from compress.report.model.answers import Answer
from foundation.artifacts.document import Document, Figures, Number
from foundation.artifacts.exported import Divided, Layer, Parity, Property
from foundation.artifacts.figures import Accuracy, Backend, Drop, Metrics
from foundation.artifacts.timed import Timing

Form = Annotated[str, "FORM"]


class TimedAccuracy(Document):
    """The primary metric of a timed configuration."""

    value: Number | None = None
    """Primary metric of exactly this configuration."""
    low: Number | None = None
    """Lower end of its 95 % interval; absent where only the value is known."""
    high: Number | None = None
    """Upper end of its 95 % interval; absent in the same cases."""
    n: int | None = None
    """Rows of that evaluation."""


class Latency(Timing):
    """The latency of one variant in one configuration of an engine, at one shape."""

    accuracy: TimedAccuracy | None = None
    """The primary metric of exactly this configuration, if it was evaluated."""


class Attention(Document):
    """How many attentions of an engine run as one kernel."""

    precision: str | None = None
    """Precision of its build."""
    engine: str | None = None
    """An engine that reports how its attentions run; the others are not listed."""
    capability: str | None = None
    """Compute capability that it was built or proved for, such as `89`."""
    float_precision: str | None = None
    """Precision of the layers that are not quantized."""
    fused: int | None = None
    """Attentions that run as one kernel, by the list of its layers."""
    required: int | None = None
    """Attentions without which the build would have failed; the others are not promised."""
    of: int | None = None
    """Attentions of the model."""
    reason: str | None = None
    """Why not all of them have to be fused; null where they have to."""


class StoredVectors(Document):
    """The vectors of a variant as codes in an index."""

    value: Number | None = None
    """Primary metric of the vectors as `int8` or `binary` codes."""
    difference: Number | None = None
    """Loss against the float vectors of the baseline in torch."""
    low: Number | None = None
    """Lower end of its 95 % interval."""
    high: Number | None = None
    """Upper end."""
    n: int | None = None
    """Number of queries or pairs."""
    groups: int | None = None
    """Groups of rows that the interval is drawn over."""
    top10_overlap: Number | None = None
    """As `top10_overlap` of the vectors themselves, of the codes."""
    bytes: int | None = None
    """Bytes of a stored vector."""
    scale: Number | None = None
    """Scale of the int8 codes; null for bits."""


class Vectors(Document):
    """The vectors of a variant in one backend."""

    cosine: Number | None = None
    """For tasks with vectors: mean cosine with the vectors of the baseline in torch."""
    lowest_cosine: Number | None = None
    """Lowest of them; both null for vectors of another width."""
    top10_overlap: Number | None = None
    """Share of the 10 nearest other texts, documents of a query, or captions and images, on which both agree."""
    n: int | None = None
    """Number of texts."""
    stored: dict[Form, StoredVectors] = Field(default_factory=dict)
    """The vectors as an index stores them: FORM is `int8` or `binary`."""


class Confidence(Document):
    """How well the confidence of a variant tells in one backend which rows the baseline answers otherwise."""

    disagreement: Number | None = None
    """Share of the evaluation rows that the baseline in torch answers otherwise."""
    auroc: Number | None = None
    """Probability that a row that is answered as by the baseline has a larger margin between the two largest logits than a row that is
    answered otherwise; null where all rows are answered alike."""
    aurc: Number | None = None
    """Area under the curve of disagreement against coverage; smaller is better."""
    n: int | None = None
    """Number of rows."""


class Variant(Document):
    """One checkpoint of the run."""

    id: str = "unnamed"
    """`baseline`, or the id of the stage that made this checkpoint."""
    stages: tuple[str, ...] = ()
    """Ids of the stages that led to it, itself last."""
    parameters: int | None = None
    """Number of parameters."""
    macs: int | None = None
    """Multiply-accumulates of one row of `data.max_length` tokens, or of one image."""
    engine: str | None = None
    """The first engine that was built for it, which sizes and shares are of; null if none was."""
    size_bytes: int | None = None
    """Deployed size: the files that the first engine loads, without the tokenizer."""
    checkpoint_bytes: int | None = None
    """Size of the checkpoint."""
    precision: str | None = None
    """Precision of its main build, such as `fp32` or `int8`; null if none was built."""
    int8_share: Number | None = None
    """Share of the multiply-accumulates of weight GEMMs that the first engine runs in int8."""
    int8_share_all: Number | None = None
    """The same, including both products of attention."""
    int4_share: Number | None = None
    """Share of the multiply-accumulates of weight GEMMs that read int4 weights there."""
    integer_weights: Number | None = None
    """Share of the weights (matrices and tables) that the files of the first engine hold as integers; null where unknown."""
    int8_share_reason: str | None = None
    """Why one of these shares is null."""
    int8_layers: tuple[Layer, ...] = ()
    """Matrix products of the first engine."""
    reported: dict[Property, str] = Field(default_factory=dict)
    """What decides the precision of the first engine, as the opened engine reports it."""
    attention: tuple[Attention, ...] = ()
    """How attentions run in engines that report it."""
    metrics: dict[Backend, Metrics] = Field(default_factory=dict)
    """Every metric in every backend."""
    accuracy: dict[Backend, Accuracy] = Field(default_factory=dict)
    """The primary metric in every backend of the run."""
    drops: dict[Backend, Drop] = Field(default_factory=dict)
    """Loss of every backend against the baseline in torch."""
    latency: tuple[Latency, ...] = ()
    """Measured latencies; the recommended mode of a shape comes first."""
    vectors: dict[Backend, Vectors] | None = None
    """For tasks with vectors: how near they are to the vectors of the baseline in torch; null for other tasks."""
    confidence: dict[Backend, Confidence] | None = None
    """For tasks with one of several classes: what its margin tells in each backend; null for other tasks, and for the baseline."""
    parity: Parity | None = None
    """How far its main engine is from torch; null where none was compared."""
    divided: Divided | None = None
    """Figures of a variant that `export.tensor_parallel` divided; null for others."""
    answers: tuple[Answer, ...] = ()
    """Its engines that answer prompts."""
    quantization: Figures | None = None
    """Figures of the stage `quantize`: settings, scales and noise of each layer; null for other variants."""
    pruning: Figures | None = None
    """Figures of the stage `prune`: sizes before and after, sensitivity, latency table; null for others."""
    sparsity: Figures | None = None
    """Figures of the stage `sparsify`: zeros of each layer; null for others."""
    adapters: dict[Backend, dict[Annotated[str, "ADAPTER"], Accuracy]] = Field(default_factory=dict)
    """The judged metric of the rows of each adapter in every backend; absent where rows name no adapters."""
    adapter_training: Figures | None = None
    """Figures of the stage `adapters`: rows, losses and parameters of each, and how far it is from its merged model; null for others."""
    compaction: Figures | None = None
    """Figures of the stage `compact`: heads and neurons removed, share of zeros, difference of the outputs; null for others."""
