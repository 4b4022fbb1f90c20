"""`export.json`: the builds of a run and their engines."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from foundation.artifacts.document import Document, Figures, Number, OfVariant
from foundation.artifacts.figures import Metrics, Quality, Tokens
from foundation.core.engines import REFERENCE

Property = Annotated[str, "PROPERTY"]


class Layer(Document):
    """A matrix product of the graph of an engine."""

    name: str | None = None
    """Name of a GEMM in the engine's graph."""
    kind: str | None = None
    """`weight`, or `attention` for a product of two activations."""
    macs: int | None = None
    """Its multiply-accumulates."""
    precision: str | None = None
    """Precision that the engine reports."""


class LayerParity(Document):
    """The integers of one int8 layer, in the engine and in torch."""

    layer: str | None = None
    """Name of the layer."""
    codes: int | None = None
    """Compared integer codes."""
    different: int | None = None
    """Codes that differ."""
    allowed: int | None = None
    """Differing codes that rounding explains."""
    sums: int | None = None
    """Compared integer sums."""
    wrong_sums: int | None = None
    """Sums that differ; none may."""


class Parity(Document):
    """How far an engine is from torch."""

    engine: str | None = None
    """Engine that was compared with torch."""
    mode: str | None = None
    """Its mode."""
    layers: tuple[LayerParity, ...] = ()
    """The int8 layers, in the order of the model."""
    disagreements: int | None = None
    """Predictions that differ from torch, on selection rows."""
    limit: int | None = None
    """Largest allowed number of them."""
    median_abs: Number | None = None
    """Median difference of a logit (of the nll of a token, for text-generation)."""
    median_limit: Number | None = None
    """Largest allowed median difference."""
    max_abs: Number | None = None
    """Largest difference; reported, not judged."""
    n: int | None = None
    """Predictions compared, on selection rows."""
    passed: bool | None = None
    """Whether the engine agrees with torch within these limits."""
    differs: str | None = None
    """Quantity of the differences: `logit` or `nll`."""
    amplified: int | None = None
    """If the model amplifies rounding: predictions of torch that a nudge of one part in a million turns; the engine is then held to its
    distance from float activations."""
    tokens: Tokens | None = None
    """For engines that answer prompts: greedy tokens compared with torch."""


class Divided(Document):
    """A model that `export.tensor_parallel` divided over devices."""

    ranks: int | None = None
    """Number of devices."""
    folder: str | None = None
    """Folder of the divided model, in the artifact of the export."""
    bytes: tuple[int, ...] = ()
    """Bytes of weights on each rank."""
    rows: int | None = None
    """Selection rows whose answers were compared with the undivided model."""
    equal: bool | None = None
    """Whether all answers are equal to the last bit."""
    disagreements: int | None = None
    """Predictions that differ."""
    median_abs: Number | None = None
    """Median difference of a logit."""
    max_abs: Number | None = None
    """Largest difference of a logit."""
    busiest: Number | None = None
    """Where experts are dealt out by their measured load: tokens that the busiest rank reads, as a multiple of the mean over ranks."""
    busiest_in_order: Number | None = None
    """The same if experts were dealt out in order."""


class FloatCache(Document):
    """The same engine with a cache in `float_precision`."""

    metrics: Metrics = Field(default_factory=dict)
    """Every metric."""
    predictions: str = ""
    """File of its predictions."""
    tokens: Tokens = Tokens()
    """Greedy answers compared with answers with such a cache."""


class Generation(Document):
    """The greedy answers of an engine."""

    file: str | None = None
    """File of the answers."""
    prompt_tokens: Number | None = None
    """Tokens of the prompts; the median, where they differ."""
    questions: bool = False
    """Whether the prompts were questions, and not the starts of rows."""
    baseline: Tokens | None = None
    """Compared with the float baseline in torch."""
    torch: Tokens | None = None
    """Compared with the same checkpoint in torch; of a compressed one on some of the prompts."""
    quality: Quality | None = None
    """For text-to-text: BLEU and chrF."""
    float_cache: FloatCache | None = None
    """The same engine with a float cache; absent where its own is one."""


class Attentions(Document):
    """Attentions of one shape."""

    group: str = ""
    """Their shapes."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes."""
    reason: str | None = None
    """Why no kernel runs them; null where one has to."""


class Fused(Document):
    """How many attentions run as one kernel."""

    fused: int | None = None
    """Attentions that run as one kernel."""
    of: int | None = None
    """Attentions of the model."""
    reason: str | None = None
    """Why not all of them have to be fused."""
    required: int | None = None
    """Attentions without which the build would have failed."""
    groups: tuple[Attentions, ...] = ()
    """Why attentions are not fused, by group."""


class Shares(Document):
    """What an engine computes in integers."""

    int8_share: Number | None = None
    """Share of the multiply-accumulates of weight GEMMs in int8."""
    int8_share_all: Number | None = None
    """The same, including both products of attention."""
    int4_share: Number | None = None
    """Share that reads int4 weights."""
    int8_share_reason: str | None = None
    """Why one of these shares is null."""
    layers: tuple[Layer, ...] = ()
    """Its matrix products."""


class HalfGraph(Document):
    """The graph in fp16 or bf16 that an engine was built from."""

    half: str = ""
    """fp16 or bf16."""
    islands: dict[Annotated[str, "RULE"], int] = Field(default_factory=dict)
    """Operations that stay float32, by the rule that keeps them."""
    operations: int | None = None
    """Operations of the graph."""
    range_rows: int | None = None
    """Rows that the ranges of its tensors were measured on."""
    left: dict[Annotated[str, "NODE"], str] = Field(default_factory=dict)
    """Why an attention is no node, by the name of its last product."""
    plain: str = ""
    """The file with attention as separate products."""
    fused: str | None = None
    """The file with attention as one node each; null where no attention can be."""


class FloatPart(Document):
    """How the precision of the float part of a build was chosen (`export.float_part`)."""

    precision: str = ""
    """The precision."""
    rows: int | None = None
    """Selection rows whose answers decided."""
    fp32: Number | None = None
    """Distance to the float model with the float part in fp32."""
    half: Number | None = None
    """The same in a half."""
    bound: Number | None = None
    """What the half may add to the distance."""


class Engine(Document):
    """An engine of a build in one mode; the fields stand in the order in which the stage `export` fills them."""

    engine: str = ""
    """Its name."""
    mode: str = ""
    """Its mode."""
    float_precision: str | None = None
    """Precision of its layers that are not quantized; absent where it is the build's."""
    file: str | None = None
    """The file that it opens."""
    runnable: bool = False
    """Whether it runs on this machine."""
    reason: str | None = None
    """Why it does not."""
    size_bytes: int | None = None
    """Bytes of the files that it loads."""
    int8_share: Number | None = None
    """Share of the multiply-accumulates of weight GEMMs in int8."""
    int8_share_all: Number | None = None
    """The same, including both products of attention."""
    int4_share: Number | None = None
    """Share that reads int4 weights."""
    integer_weights: Number | None = None
    """Share of the weights that its files hold as integers."""
    int8_share_reason: str | None = None
    """Why one of these shares is null."""
    layers: tuple[Layer, ...] = ()
    """Its matrix products."""
    reported: dict[Property, str] = Field(default_factory=dict)
    """What decides its precision, as the opened engine reports it: settings of the compiled model, and what products do to their inputs."""
    metrics: Metrics = Field(default_factory=dict)
    """Every metric on the evaluation rows."""
    n: int | None = None
    """Evaluated rows."""
    predictions: str | None = None
    """File of its predictions."""
    cache_precision: str | None = None
    """Precision of keys and values in the cache."""
    properties: dict[Property, str] = Field(default_factory=dict)
    """Its settings."""
    reads: Figures | None = None
    """Bytes that are read for a token, where it answers prompts."""
    towers: dict[Annotated[str, "TOWER"], str] = Field(default_factory=dict)
    """The file of each tower, where a build has two."""
    capability: str | None = None
    """Compute capability that it was built or proved for."""
    library: str | None = None
    """Version of the library that built or proved it, for GPUs."""
    seconds: Number | None = None
    """How long that took."""
    num_layers: int | None = None
    """Layers of the built engine."""
    attention: Fused | None = None
    """How its attentions run, where it reports it."""
    compiled: Shares | None = None
    """Shares and layers of the built engine."""
    gemms: dict[Annotated[str, "LAYER"], int] = Field(default_factory=dict)
    """Products of the graph."""
    half_graph: HalfGraph | None = None
    """The graph in fp16 or bf16."""
    generation: Generation | None = None
    """Its greedy answers, where it answers prompts."""
    parity: Parity | None = None
    """How far it is from torch."""
    speculation: Figures | None = None
    """Effect of proposed tokens."""

    @property
    def figures(self) -> dict[str, float]:
        """Its metrics, as far as they are known."""
        return {name: value for name, value in self.metrics.items() if value is not None}


class Build(Document):
    """A variant in one precision."""

    variant: str = ""
    """Id of the variant."""
    precision: str = ""
    """Its precision."""
    float_precision: str = ""
    """Precision of its layers that are not quantized."""
    folder: str = ""
    """Its folder."""
    onnx: str | None = None
    """Its graph; null where no engine of the target reads one."""
    engines: tuple[Engine, ...] = ()
    """Its engines in the order of the target, of an engine the recommended mode first."""
    parity: Parity | None = None
    """How far its main engine is from torch."""
    float_part: FloatPart | None = None
    """How the precision of its float part was chosen."""
    adapters: tuple[str, ...] = ()
    """Names of its adapters, one of which each row names; absent for a model without."""

    def key(self, engine: Engine) -> tuple[str, str, str, str, str]:
        """Returns the configuration of one of its engines: variant, precision, float_precision, engine and mode."""
        return self.variant, self.precision, engine.float_precision or self.float_precision, engine.engine, engine.mode

    @property
    def recommended(self) -> tuple[Engine, ...]:
        """One entry for each engine but torch: its recommended mode, which is listed first."""
        first: dict[str, Engine] = {}
        for engine in self.engines:
            if engine.engine != REFERENCE:
                first.setdefault(engine.engine, engine)
        return tuple(first.values())


class DividedVariant(Divided, OfVariant):
    """The variant that was divided over devices; its id comes first."""


class Exported(Document):
    """The contents of export.json."""

    schema_: int = Field(1, alias="schema")
    """Version of this layout: 1."""
    builds: tuple[Build, ...] = ()
    """The builds."""
    compressed_tensors: str | None = None
    """Folder of the last variant in the format compressed-tensors; null where it was not written."""
    divided: DividedVariant | None = None
    """Models divided by `export.tensor_parallel`; absent if none was."""
