"""What sets a task apart: the columns of the table of tasks (`foundation.labels.tasks`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from foundation.labels.answer import Answer
from foundation.labels.candidates import Candidates
from foundation.labels.captions import Captions
from foundation.labels.label_sets import SetAnswer
from foundation.labels.next_token import TokenAnswer
from foundation.labels.relevance import Judged
from foundation.labels.spans import SpanAnswer
from foundation.labels.tags import TagAnswer
from foundation.labels.transcripts import TranscriptAnswer
from foundation.labels.value import Numbers
from foundation.labels.vector import VectorAnswer
from foundation.labels.zero_shot import ImagesAndTexts


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
    """Its configuration; empty if it has only one."""
    model: str = ""
    """Model of the Hub; empty where the recipe starts from random weights."""
    head: Literal["keep", "new"] = "new"
    """`keep` if the model is already fine-tuned; `new` makes finetune the first stage."""
    where: str = ""
    """Allowed kinds of `data.path`, if they depend on the task and not only on its modality."""
    more: str = ""
    """Another line of the section data."""


@dataclass(frozen=True)
class Facts:
    """The properties of a task."""

    modality: Literal["text", "image", "audio"]
    """What its rows are made of."""
    answer: Answer
    """What a model answers to a row, and the form of its labels."""
    columns: tuple[str, ...]
    """Columns that it reads: fields of `foundation.data.config.Columns`, labels last."""
    metrics: tuple[str, ...]
    """Rows of `foundation.measure.metrics.METRICS`, in the order of the report. The first is the primary one, which goals judge."""
    auto_class: str
    """The class of Transformers that picks the model class."""
    problem_type: str | None
    """`problem_type` in config.json; None where the model has no classifier."""
    pipeline_tag: str
    """The task's name on the Hub, for model cards."""
    example: Example
    """Example in the recipe that `compress init` writes."""
    encoder_decoder: bool = False
    """Whether an encoder reads a source text, and a decoder answers with another."""
    needs_pairs: bool = False
    """Whether the data have to be pairs of texts, or triplets."""
    counts: str = "rows"
    """What figures are means over, for the report."""
    label_column: str = "label"
    """What the column of the labels is called where the recipe does not say."""

    @property
    def metric(self) -> str:
        """The primary metric."""
        return self.metrics[0]

    @property
    def generates(self) -> bool:
        """Whether a model of the task writes text, token by token."""
        return isinstance(self.answer, TokenAnswer)

    @property
    def embeds(self) -> bool:
        """Whether it answers with vectors."""
        return isinstance(self.answer, VectorAnswer)

    @property
    def beyond_tensorrt(self) -> bool:
        """Whether the repository of TensorRT cannot give the answers, so that a GPU serves them from our own kernels or not at all."""
        return self.generates or self.answer.NOT_ON_GPUS is not None

    @property
    def embeds_texts(self) -> bool:
        """Whether it answers texts with vectors, which a model with one tower pools from their tokens."""
        return self.embeds and not self.two_towers

    @property
    def searches(self) -> bool:
        """Whether documents are searched with queries: the data have BEIR's layout, and figures are means over queries."""
        return self.answer.form in (Judged, Candidates)

    @property
    def confidence(self) -> str | None:
        """Form of the scores by which a model of a cascade keeps a row (`foundation.standalone.confidence`); None where there are none.
        What is searched is ranked with others: no row of it is answered alone."""
        return None if self.searches or self.two_towers else self.answer.CONFIDENCE

    @property
    def two_towers(self) -> bool:
        """Whether a row is an image or a text, and a model has a tower for each, whose vectors are of one space
        (`foundation.models.heads.towers`)."""
        return issubclass(self.answer.form, ImagesAndTexts)

    @property
    def pads_texts(self) -> bool:
        """Whether its models read texts that are padded."""
        return self.modality == "text" and not self.generates

    def has_lengths(self, sequence_lengths: Sequence[int]) -> bool:
        """Whether rows have lengths: texts have, images have not, sounds have where their model reads waveforms.

        Args:
            sequence_lengths: `target.sequence_lengths`.
        """
        return self.reads_text or (self.modality == "audio" and bool(sequence_lengths))

    @property
    def reads_windows(self) -> bool:
        """Whether texts that are longer than the model reads can be read in windows, whose logits become one answer."""
        return self.modality == "text" and self.answer.POOLS_WINDOWS

    @property
    def reads_text(self) -> bool:
        """Whether its models have a tokenizer."""
        return self.modality == "text" or self.two_towers

    @property
    def named_classes(self) -> bool:
        """Whether rows have a class whose name the data know; the model has an output for each only where the answer `classifies`."""
        return self.answer.classifies or (self.two_towers and not self.captioned)

    @property
    def captioned(self) -> bool:
        """Whether images have captions of their own, and no class that texts are made of."""
        return self.answer.form is Captions

    @property
    def tags(self) -> bool:
        """Whether it answers with a tag for each word."""
        return isinstance(self.answer, TagAnswer)

    @property
    def finds_spans(self) -> bool:
        """Whether it answers questions with spans of a text, which is read in windows."""
        return isinstance(self.answer, SpanAnswer)

    @property
    def transcribes(self) -> bool:
        """Whether it answers sounds with the text that is spoken in them."""
        return isinstance(self.answer, TranscriptAnswer)

    @property
    def needs_negatives(self) -> bool:
        """Whether the data have to be triplets of texts: a task that reads negatives and no scores."""
        return "negative" in self.columns and "label" not in self.columns

    @property
    def reads_negatives(self) -> bool:
        """Whether train rows may have negatives: in columns, or as candidates of a first search."""
        return "negative" in self.columns or (self.searches and self.embeds)

    @property
    def multi_label(self) -> bool:
        """Whether any number of labels may hold for a row."""
        return isinstance(self.answer, SetAnswer)

    @property
    def reranks(self) -> bool:
        """Whether it puts candidates of a query in order."""
        return self.answer.form is Candidates

    @property
    def regression(self) -> bool:
        """Whether it answers with a number that is in the data."""
        return self.answer.form is Numbers

    @property
    def answers_whole_texts(self) -> bool:
        """Whether it answers a text, or a pair of texts, with classes or a value."""
        whole = self.answer.JUDGES_CLASSES or self.regression
        return self.modality == "text" and whole and not (self.two_towers or self.answer.PER_TOKEN or self.searches or self.embeds)

    @property
    def needs_labels(self) -> bool:
        """Whether rows have separate labels; captions and negatives count as labels, text to generate is its own label."""
        return "label" in self.columns or self.captioned or self.needs_negatives
