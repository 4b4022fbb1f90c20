"""What sets a task apart: the columns of the table of tasks (`foundation.core.tasks`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Example:
    """The model and data in the recipe that `compress init` writes."""

    about: str
    """First line of the recipe: one sentence."""
    name: str
    """Name of the run."""
    data: str
    """Data set of the Hub."""
    columns: str
    """Its columns, as YAML."""
    subset: str = ""
    """Its configuration; empty where it has one alone."""
    model: str = ""
    """Model of the Hub; empty where the recipe starts from random weights."""
    head: Literal["keep", "new"] = "new"
    """`keep` where the model is fine-tuned already; `new` makes finetune the first stage."""
    where: str = ""
    """What `data.path` can be, where that depends on the task and not on its modality alone."""
    more: str = ""
    """Another line of the section data."""


@dataclass(frozen=True)
class Facts:
    """All that sets a task apart."""

    modality: Literal["text", "image", "audio"]
    """What its rows are made of."""
    answer: Literal["class", "labels", "tags", "transcript", "span", "value", "tokens", "vector"]
    """What a model answers to a row."""
    columns: tuple[str, ...]
    """What it reads of a data set: fields of `foundation.data.config.Columns`, what rows have for labels last."""
    metrics: tuple[str, ...]
    """Rows of `foundation.measure.metrics.METRICS`, in the order of the report. The first is the primary one: goals are about it."""
    auto_class: str
    """The class of Transformers that picks the model class."""
    problem_type: str | None
    """`problem_type` in config.json; None where the model has no classifier."""
    pipeline_tag: str
    """The task's name on the Hub, for model cards."""
    example: Example
    """What `compress init` writes."""
    encoder_decoder: bool = False
    """Whether an encoder reads a source text, and a decoder answers with another."""
    needs_pairs: bool = False
    """Whether the data have to be pairs of texts, or triplets."""
    counts: str = "rows"
    """What figures are means over, for the report."""
    searches: bool = False
    """Whether documents are searched with queries: the data have BEIR's layout, and figures are means over queries."""
    label_column: str = "label"
    """What the column of the labels is called where the recipe does not say."""
    two_towers: bool = False
    """Whether a row is an image or a text, and a model has a tower for each, whose vectors are of one space
    (`foundation.models.heads.towers`)."""

    @property
    def metric(self) -> str:
        """The primary metric."""
        return self.metrics[0]

    @property
    def generates(self) -> bool:
        """Whether a model of the task writes text, token by token."""
        return self.answer == "tokens"

    @property
    def embeds(self) -> bool:
        """Whether it answers with a vector for each text."""
        return self.answer == "vector"

    @property
    def classifies(self) -> bool:
        """Whether it has an output for each label, whose names the data or the model know; of transcripts these are characters."""
        return self.answer in ("class", "labels", "tags", "transcript")

    @property
    def reads_text(self) -> bool:
        """Whether its models have a tokenizer."""
        return self.modality == "text" or self.two_towers

    @property
    def named_classes(self) -> bool:
        """Whether rows have a class whose name the data know; the model has an output for each only where the task `classifies`."""
        return self.classifies or (self.two_towers and not self.captioned)

    @property
    def captioned(self) -> bool:
        """Whether images have captions of their own, and no class that texts are made of."""
        return self.two_towers and "text" in self.columns

    @property
    def tags(self) -> bool:
        """Whether it answers with a tag for each word."""
        return self.answer == "tags"

    @property
    def finds_spans(self) -> bool:
        """Whether it answers questions with spans of a text, which is read in windows."""
        return self.answer == "span"

    @property
    def transcribes(self) -> bool:
        """Whether it answers sounds with the text that is spoken in them."""
        return self.answer == "transcript"

    @property
    def reads_windows(self) -> bool:
        """Whether texts that are longer than the model reads can be read in windows, whose logits become one answer."""
        return self.modality == "text" and self.answer in ("class", "labels")

    @property
    def per_token(self) -> bool:
        """Whether a model of the task has logits for every token of a row, or every frame of a sound."""
        return self.answer in ("tokens", "tags", "span", "transcript")

    @property
    def needs_negatives(self) -> bool:
        """Whether the data have to be triplets of texts: a task that reads negatives and no scores."""
        return "negative" in self.columns and "label" not in self.columns

    @property
    def reads_negatives(self) -> bool:
        """Whether rows to train on may have negatives: columns of theirs, or documents that a first search found."""
        return "negative" in self.columns or (self.searches and self.embeds)

    @property
    def multi_label(self) -> bool:
        """Whether any number of labels may hold for a row."""
        return self.answer == "labels"

    @property
    def judges_classes(self) -> bool:
        """Whether every class has a recall and a precision over rows."""
        return self.answer in ("class", "labels")

    @property
    def fits_thresholds(self) -> bool:
        """Whether thresholds that are chosen on selection rows decide what holds."""
        return self.multi_label or self.finds_spans

    @property
    def reranks(self) -> bool:
        """Whether it puts candidates of a query in order."""
        return self.searches and self.answer == "value"

    @property
    def regression(self) -> bool:
        """Whether it answers with a number that is in the data."""
        return self.answer == "value" and not self.searches

    @property
    def needs_labels(self) -> bool:
        """Whether rows have labels of their own, which captions and negatives are; text to generate is its own label."""
        return "label" in self.columns or self.captioned or self.needs_negatives
