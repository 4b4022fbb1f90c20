"""`cascade.json`: the tiers of a cascade, their thresholds, and the certificate of how often its answers are other ones.

report.json holds the same document. The predictions that the certificate follows from are stored next to it, in safetensors files:

    original   predictions of the original in torch, fp32: float32 [n, ...]
    tier.1     predictions of the first tier in its engine, of the same shape; tier.2, ... follow
    keys       content keys of the rows, uint8 [n, 16]
    labels     their labels, where there are any, as their form has them
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from foundation.artifacts.document import Document, Number
from foundation.standalone.confidence import Score

FILE = "cascade.json"
ORIGINAL, TIER, KEYS, LABELS = "original", "tier.", "keys", "labels"
"""Names of the stored predictions; `TIER` is followed by the number of the tier."""


class ScoreOfTier(Document):
    """How sure a tier is of an answer (`foundation.standalone.confidence`)."""

    name: str = "margin"
    """margin, entropy, energy or calibrated."""
    form: str = "class"
    """Form of the answers: class, set, tags, value or vector."""
    temperature: Number = 1.0
    """What logits are divided by."""
    weights: tuple[Number, ...] = ()
    """Of a calibrated score: weights of margin, entropy and energy; of values and vectors weights of their numbers."""
    bias: tuple[Number, ...] = ()
    """Of a calibrated score: one for each class, or one for all."""

    @property
    def score(self) -> Score:
        """The same, for the functions on logits."""
        weights, bias = [float(one) for one in self.weights], [float(one) for one in self.bias]
        return Score(name=self.name, form=self.form, temperature=float(self.temperature), weights=weights, bias=bias)


class Tier(Document):
    """A tier: a build in one of its engines."""

    number: int = 0
    """Its place, from 1."""
    variant: str = ""
    """Id of the variant."""
    precision: str = ""
    """Precision of the build."""
    float_precision: str = ""
    """Precision of its layers that are not quantized."""
    engine: str = ""
    """The engine that answers."""
    mode: str = ""
    """Its mode."""
    build: str = ""
    """Folder of the build."""
    checkpoint: str = ""
    """Digest of the checkpoint of the variant."""
    cost_ms: Number = 0.0
    """Mean time of a row at the live mix that the path was fixed with, milliseconds."""
    score: ScoreOfTier | None = None
    """How sure it is of an answer; null for the last tier."""
    threshold: Number | None = None
    """Least score of a row that it keeps. null: it keeps none, and the last tier all that reach it."""
    disagreements_alone: int = 0
    """Certificate rows that the tier alone answers otherwise than the original."""

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """The configuration: variant, precision, float_precision, engine and mode."""
        return self.variant, self.precision, self.float_precision, self.engine, self.mode


class OriginalModel(Document):
    """The model that answers are compared with: in torch, in fp32."""

    variant: str = ""
    """Id of the variant."""
    digest: str = ""
    """Digest of its checkpoint."""


class PathPoint(Document):
    """A point of the path."""

    thresholds: tuple[Number | None, ...] = ()
    """Threshold of each tier but the last."""
    disagreements: int = 0
    """Certificate rows that the cascade answers otherwise there."""
    p_value: Number = 1.0
    """The p-value of "a risk is above its bound"."""
    passed: bool = False
    """Whether it passed, as did every point before it."""
    escalated: tuple[int, ...] = ()
    """Certificate rows that go beyond each tier but the last."""


class WalkedPath(Document):
    """The points in the order in which they were tested."""

    selection_rows: int = 0
    """Selection rows that fixed the path."""
    predictions: str = ""
    """File of the predictions of these rows."""
    points: tuple[PathPoint, ...] = ()
    """The points, the most careful one first."""
    chosen: int = 0
    """Number of the point that is served, from 0: the fastest of those that passed before the first failure, as selection rows say."""


class DropBound(Document):
    """The second bound, on the drop of the share of right answers."""

    limit: Number = 0.0
    """The bound."""
    drop: Number = 0.0
    """The drop on the certificate rows."""
    p_value: Number = 1.0
    """Its p-value."""


class Certificate(Document):
    """How often the cascade answers otherwise than the original."""

    bound: Number = 0.0
    """Largest share of units with another answer."""
    max_distance: Number | None = None
    """Distance above which a number or a vector is another answer; null for answers that are the same or not."""
    confidence: Number = 0.95
    """Confidence that the bound holds, over draws of the certificate rows."""
    n: int = 0
    """Units that it rests on."""
    disagreements: int = 0
    """Of these, units with another answer."""
    p_value: Number = 1.0
    """The p-value at the chosen thresholds: the larger one of two bounds."""
    max_drop: DropBound | None = None
    """The bound on the drop, where one was named."""
    rows_sha256: str = ""
    """sha256 of the certificate rows, in order."""
    rows_shared: int = 0
    """Rows of the files that were left out, as they are train, selection or evaluation rows too."""
    predictions: str = ""
    """File of the predictions of these rows."""
    path: WalkedPath = WalkedPath()
    """The path that was tested."""

    @property
    def distance(self) -> float | None:
        """`max_distance` as a float."""
        return None if self.max_distance is None else float(self.max_distance)


class Escalation(Document):
    """How many rows go beyond a tier."""

    tier: int = 0
    """Number of the tier, from 1."""
    units: int = 0
    """Certificate units that go beyond it."""
    n: int = 0
    """All certificate units."""
    rate: Number = 0.0
    """The share."""
    upper: Number = 1.0
    """Upper confidence limit of the share in the traffic, for all tiers together, although the same units chose the thresholds."""
    confidence: Number = 0.95
    """Confidence of that limit."""


class Times(Document):
    """Times of a row."""

    mean_ms: Number | None = None
    """Mean, milliseconds."""
    p50_ms: Number | None = None
    """Median."""
    p90_ms: Number | None = None
    """90th percentile."""
    p99_ms: Number | None = None
    """99th percentile."""


class LiveMix(Document):
    """Times at the live mix: rows of the lengths of the evaluation rows, one at a time."""

    batch: int = 1
    """Rows of a call that was timed."""
    rows: int = 0
    """Evaluation rows."""
    cascade: Times = Times()
    """The cascade, as these rows go through it."""
    tiers: tuple[Times, ...] = ()
    """Each tier, if it answered all rows."""


class Cascade(Document):
    """The contents of cascade.json."""

    schema_: int = Field(1, alias="schema")
    """Version of this layout: 1."""
    task: str = ""
    """The task."""
    unit: str = "row"
    """What a unit is: one row, as a user sends it."""
    original: OriginalModel = OriginalModel()
    """The model that answers are compared with."""
    exported: str = ""
    """Digest of the artifact of the engines."""
    tiers: tuple[Tier, ...] = ()
    """The tiers in rising order of cost; the last is the original in an engine."""
    certificate: Certificate = Certificate()
    """The certificate."""
    escalation: tuple[Escalation, ...] = ()
    """One entry for each tier but the last."""
    times: LiveMix | None = None
    """Times at the live mix; null where no latency was measured."""
    rows_per_tier: tuple[int, ...] = ()
    """Certificate rows that each tier answers."""
    scores: tuple[dict[Annotated[str, "SCORE"], Number], ...] = ()
    """For each tier but the last, the AUROC of each compared score on selection rows: how well it ranks other answers last."""
