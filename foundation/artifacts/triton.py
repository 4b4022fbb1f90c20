"""`triton.json`: accuracy and speed of the running server, and the search over its settings. report.json holds the same maps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from foundation.artifacts.document import Document, Figures, Number
from foundation.artifacts.figures import Metrics, Percentiles, Tokens


class Load(Document):
    """The latency of a model at one number of concurrent requests."""

    concurrency: int | None = None
    """Number of concurrent requests."""
    p50_ms: Number | None = None
    """Median, over gRPC, milliseconds."""
    p90_ms: Number | None = None
    """90th percentile."""
    p99_ms: Number | None = None
    """99th percentile."""
    first_token_ms: Percentiles = Percentiles()
    """For language models: time to the first token."""
    token_ms: Percentiles = Percentiles()
    """For language models: time per token."""
    tokens_per_s: Number = 0.0
    """For language models: tokens per second of all answers together."""
    throughput_per_s: Number | None = None
    """Rows per second."""
    n: int | None = None
    """Number of requests."""
    prompt_tokens: int | None = None
    """For language models: tokens of a prompt."""
    answer_tokens: int | None = None
    """For language models: tokens of an answer."""
    engine_tokens_per_s: Number | None = None
    """For language models: tokens per second of the engine alone, in a separate process, with as many prompts at once."""
    engine_share: Number | None = None
    """For language models: tokens per second of the server / tokens per second of the engine."""


class Limit(Document):
    """The latency of requests at a shape that `goals.max_latency_ms` limits."""

    batch: int | None = None
    """Rows of a request."""
    sequence: int | None = None
    """Its length in tokens; null for images."""
    p50_ms: Number | None = None
    """Median latency of such requests, one under way."""
    p90_ms: Number | None = None
    """90th percentile."""
    p99_ms: Number | None = None
    """99th percentile; null below 200 requests."""
    n: int | None = None
    """Requests."""
    waited: Number | None = None
    """Share of the time in which the threads of server and client could have run that they waited for a core. Above 0.5 goals
    are not judged. Absent where the kernel does not report it."""
    reason: str | None = None
    """Reason for a missing measurement; absent otherwise."""


class TritonModel(Document):
    """A model of the repository."""

    model: str | None = None
    """Name of a model in the repository."""
    server: str = "triton"
    """Server that evaluated it (`foundation.core.engines.SERVERS`); absent: Triton."""
    variant: str | None = None
    """The variant that it serves."""
    precision: str | None = None
    """Precision of the build."""
    engine: str | None = None
    """Engine behind it."""
    mode: str | None = None
    """Mode of the engine."""
    float_precision: str | None = None
    """Precision of its layers that are not quantized."""
    metrics: Metrics = Field(default_factory=dict)
    """Every metric, from the predictions of the running server."""
    n: int | None = None
    """Number of evaluated rows."""
    predictions: str | None = None
    """File of the predictions, in the artifact of the stage."""
    disagreements: int | None = None
    """Predictions that differ from the engine's."""
    median_abs: Number | None = None
    """Median difference of a logit between server and engine."""
    max_abs: Number | None = None
    """Largest difference."""
    tokens: Tokens | None = None
    """For language models: the server's answers compared with the engine's."""
    texts: int | None = None
    """For language models: prompts that were sent as text and as messages, and were read and answered as Transformers reads them."""
    peak_memory_bytes: int | None = None
    """Peak memory of the server and the processes of the model, added up; null where one of them had ended."""
    latency: tuple[Load, ...] = ()
    """Load tests."""
    limits: tuple[Limit, ...] = ()
    """Latencies that `goals.max_latency_ms` limits at the server."""
    reason: str | None = None
    """Why a model was not evaluated."""

    @property
    def figures(self) -> dict[str, float]:
        """Its metrics, as far as they are known."""
        return {name: value for name, value in self.metrics.items() if value is not None}


class CascadeModel(TritonModel):
    """A certified cascade in the repository."""

    rows_per_tier: tuple[int, ...] = ()
    """Evaluation rows that each tier answered."""
    routed_otherwise: int | None = None
    """Evaluation rows that another tier answered than the predictions of the engines say."""
    audited_share: Number | None = None
    """Share of the rows that the audit draws."""
    false_alarm: Number | None = None
    """Largest probability that any alarm ever rings without cause."""


class Settings(Document):
    """Settings of a served model."""

    instances: int | None = None
    """Processes or instances of the model."""
    threads: int | None = None
    """Threads of each."""
    max_batch_size: int | None = None
    """Largest batch that the server makes."""
    max_queue_delay_us: int = 0
    """Largest time that it waits for a batch, microseconds."""

    @property
    def point(self) -> tuple[int | None, ...]:
        """Only the settings."""
        return self.instances, self.threads, self.max_batch_size, self.max_queue_delay_us


class Trial(Settings):
    """Settings that were tried."""

    own: bool | None = None
    """Whether these are the settings of the recipe."""
    rows_per_s: Number | None = None
    """Rows per second of the best load within the limit."""
    p99_ms: Number | None = None
    """Its p99, milliseconds; null where no load was within the limit."""
    concurrency: int | None = None
    """Its concurrent requests."""
    rounds: int | None = None
    """Number of measurements."""
    loads: tuple[Figures, ...] = ()
    """Every load that was measured."""


class Bounds(Document):
    """A ratio and its 95 % interval."""

    value: Number | None = None
    """Rate of the proposed settings over the rate of the recipe's; null: no bound."""
    low: Number | None = None
    """Lower end of its 95 % interval."""
    high: Number | None = None
    """Upper end of its 95 % interval; null: no bound."""


class Confirmation(Document):
    """Proposed settings and settings of the recipe, measured again in turns."""

    proposed: Settings = Settings()
    """The settings that won the search, measured again next to the settings of the recipe."""
    repeats: int | None = None
    """How often both were measured again, in turns."""
    rows_per_s: tuple[Number, ...] = ()
    """Rows per second of the proposed settings in each repeat; 0: none in time."""
    own_rows_per_s: tuple[Number, ...] = ()
    """Rows per second of the settings of the recipe in each repeat."""
    ratio: Bounds = Bounds()
    """How much faster the proposed settings are."""
    taken: bool | None = None
    """Whether they are served: the lower end is above 1."""


class Tuned(Document):
    """The search over the settings of the served model."""

    model: str | None = None
    """The model whose settings were searched."""
    best: Settings | None = None
    """The settings that are served."""
    limit_p99_ms: Number | None = None
    """Largest p99 of a load that counts, milliseconds."""
    confirmation: Confirmation | None = None
    """Measurements that confirmed them; null if the recipe's settings won."""
    trials: tuple[Trial, ...] = ()
    """Settings that were tried, first the settings that are served."""


class Triton(Document):
    """Models that Triton serves."""

    models: tuple[TritonModel, ...] = ()
    """The models of the repository."""
    tuned: Tuned | None = None
    """The search over settings; absent without `triton_repo.tune`."""
    cascade: CascadeModel | None = None
    """The certified cascade of the repository, which is served; absent without one."""
    reason: str | None = None
    """Reason for missing models; absent otherwise."""


class Results(Document):
    """The contents of triton.json."""

    schema_: int = Field(1, alias="schema")
    """Version of this layout: 1."""
    layout: str | None = None
    """Layout of the repository."""
    models: tuple[TritonModel, ...] = ()
    """The models of the repository."""
    versions: dict[Annotated[str, "PACKAGE"], str] = Field(default_factory=dict)
    """Version of each library of the server's environment."""
    chosen: str | None = None
    """The model that the run chose to serve; null without a choice."""
    tuned: Tuned | None = None
    """The search over settings; absent without `triton_repo.tune`."""
    cascade: CascadeModel | None = None
    """The certified cascade of the repository, which is served; absent without one."""
    gpu: TritonModel | None = None
    """The model of the additional repository for GPUs, which no server has run."""
    kernels: TritonModel | None = None
    """The model of the additional repository for our own kernels."""
    ranks: TritonModel | None = None
    """The model of the additional repository of a divided model."""

    @property
    def additional(self) -> tuple[TritonModel, ...]:
        """The models of the additional repositories."""
        return tuple(model for model in (self.gpu, self.kernels, self.ranks) if model is not None)
