"""The `data` section of a recipe: the location of the rows and the meaning of their columns."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from foundation.core.config import Config
from foundation.data.tables import Column, Quoting
from foundation.labels.tasks import TASKS, Task

ColumnName = Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=0, strict=True)]


class Columns(Config):
    """Columns to read: names, or positions counted from 0 if a file has no header."""

    LATER: ClassVar[tuple[str, ...]] = ("adapter",)

    text: ColumnName | None = None
    """Column of the text, or of the first text of a pair; by default `text`. Where images have captions it is the caption of an image, or a
    list of them."""
    text_pair: ColumnName | None = None
    """Column of the second text of a pair; leave it out for single texts. For sentence-embedding and sentence-triplets, which read pairs
    and triplets, by default `text_pair`."""
    negative: ColumnName | Annotated[tuple[ColumnName, ...], Field(min_length=1)] | None = None
    """Of triplets, column of a text that does not say what the other two say, or of a list of such texts; or a list of columns, where empty
    cells are left out. For sentence-triplets by default `negative`. For sentence-embedding rows are triplets, without a score, where it is
    given; leave it out for pairs."""
    margin: ColumnName | Annotated[tuple[ColumnName, ...], Field(min_length=1)] | None = None
    """Of triplets to train on with `margin_mse`, column of the margin of each negative, a number or a list of numbers, or a list of
    columns: how much higher a teacher scores the positive than this negative. Default: none."""
    tokens: ColumnName | None = None
    """Column of the words of a sentence, a list; by default `tokens`. CoNLL files have no named columns: the word comes first in a line,
    its tag last."""
    question: ColumnName | None = None
    """Column of the question; by default `question`. Files of SQuAD have no columns."""
    context: ColumnName | None = None
    """Column of the text that contains the answer; by default `context`."""
    source: ColumnName | None = None
    """Column of the text that a text-to-text model reads; by default `source`. In a folder of line-aligned text files the end of the
    file's name: `en` reads train.en or train.en.gz."""
    target: ColumnName | None = None
    """Column of the text that it answers with; by default `target`. Named as `source` is."""
    image: ColumnName | None = None
    """Column of the image (encoded bytes, or a path relative to the table); by default `image`. Image folders and archives have no
    columns."""
    audio: ColumnName | None = None
    """Column of the sound (an encoded WAV or FLAC file, or a path relative to the table); by default `audio`. Folders and archives of
    sounds have no columns."""
    adapter: ColumnName | None = None
    """Column of the name of the adapter that is to answer a row, for the stage `adapters`. For texts with classes or a value."""
    label: ColumnName | None = None
    """Column of the label; by default `label`. Pairs of sentence-embedding to train on may have none: they say the same then. A split whose
    labels are all -1 counts as unlabelled. Where any number of labels may hold, a cell is a list of labels, a vector of 0 and 1
    (`data.multi_hot`), or a text with the same between commas; of words it is the list of their tags, by default `labels`; of a question
    its answers, `{text: [...], answer_start: [...]}`, by default `answers`; of speech the text that is spoken, by default `text`. Not used
    for text-generation."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Columns:
        for name in ("negative", "margin"):
            given = getattr(self, name)
            if isinstance(given, tuple) and len(set(given)) < len(given):
                raise ValueError(f"{name}: {[*given]} given; a column can be named once: leave out the others")
        if self.negative is not None and self.label is not None:
            raise ValueError(f"label {self.label!r} and negative {self.negative!r} given; triplets have no score: leave one of them out")
        return self

    def over(self, base: Columns) -> Columns:
        """Returns these columns, with missing ones taken from `base`; a negative in either replaces a label in the other, and back."""
        given = self.model_dump(exclude_none=True)
        replaced = {"negative": ("label",), "label": ("negative", "margin")}
        others = dict.fromkeys(other for name in given for other in replaced.get(name, ()))
        return base.model_copy(update={**others, **given})

    def named(self, task: Task) -> dict[str, Column]:
        """Returns the columns that a task reads by their keys, the label, if any, last; one that is not given is named after its key.

        Of several negatives the keys are `negative`, `negative 2`, `negative 3`, ..., and of their margins alike.
        """
        facts = TASKS[task]
        given = {name: getattr(self, name) for name in facts.columns}
        left_out = {"margin", *(() if facts.needs_pairs else ("text_pair",)), *(() if facts.needs_negatives else ("negative",))}
        if given.get("negative") is not None:
            left_out.add("label")
        unnamed = {"label": facts.label_column}
        names = {name: unnamed.get(name, name) if column is None else column for name, column in given.items()}
        found = {name: column for name, column in names.items() if given[name] is not None or name not in left_out}
        if self.adapter is not None and facts.answers_whole_texts:
            label = found.pop("label")
            found |= {"adapter": self.adapter, "label": label}
        return {key: column for name, columns in found.items() for key, column in _by_key(name, columns)}

    def wanted(self, task: Task) -> tuple[Column, ...]:
        """Returns the columns that a task reads, the label, if any, last."""
        return tuple(self.named(task).values())


def _by_key(name: str, columns: Column | tuple[Column, ...]) -> list[tuple[str, Column]]:
    several = columns if isinstance(columns, tuple) else (columns,)
    return [(f"{name} {number}" if number > 1 else name, column) for number, column in enumerate(several, 1)]


class FileConfig(Config):
    """A file with its own header setting or columns."""

    LATER: ClassVar[tuple[str, ...]] = ("repeat",)

    file: Annotated[str, Field(min_length=1)]
    """Path of the file, relative to `data.path`; of two line-aligned files what their names have in common: `train` of train.en and
    train.de."""
    header: bool | None = None
    """Whether the first line names the columns (tsv and csv). Default: `data.header`."""
    quoting: Quoting | None = None
    """How quotes in tsv files are read. Default: `data.quoting`."""
    columns: Columns = Columns()
    """Columns of this file; missing ones are taken from `data.columns`."""
    repeat: Annotated[int, Field(ge=1, le=1000)] = 1
    """How many times each row is trained on in a pass, to give a small file more weight. Only of train files; rows that are set aside for
    selection or for the test split do not repeat."""


def _as_files(value: Any) -> Any:
    entries = value if isinstance(value, list | tuple) else [value]
    return [{"file": entry} if isinstance(entry, str) else entry for entry in entries]


Files = Annotated[tuple[FileConfig, ...], BeforeValidator(_as_files)]


def _check_once(name: str, files: Files) -> None:
    """Raises if a row that is not trained on would count more than once."""
    for entry in files:
        if entry.repeat != 1:
            raise ValueError(f"{name}: repeat: {entry.repeat} given for {entry.file}; only train rows are repeated: leave it out")


class FilesConfig(Config):
    """Files of each split: one file, or a list of files that are read in order."""

    train: Annotated[Files, Field(min_length=1)]
    """Rows to train on."""
    test: Files = ()
    """Rows for the reported results."""
    validation: Files = ()
    """Rows for decisions such as model selection; used for the reported results if there is no labelled test split."""

    @model_validator(mode="after")
    def _trained_rows_repeat(self) -> FilesConfig:
        _check_once("test", self.test)
        _check_once("validation", self.validation)
        return self


class CertifyConfig(Config):
    """Rows that a certificate rests on (stage `cascade`), and that nothing else reads."""

    files: Annotated[Files, Field(min_length=1)]
    """One file, or a list of files, as in `data.files`. They need no labels: labels are read where `columns.label` is given, or from the
    folders of images and sounds. The rows have to be drawn like those that the model will be asked, and none may have trained it."""
    shared: Literal["refuse", "drop"] = "refuse"
    """What happens to rows that are train, selection or evaluation rows too. refuse: the run ends. drop: they are left out of the
    certificate, and the report says how many they are."""

    @model_validator(mode="after")
    def _never_repeat(self) -> CertifyConfig:
        _check_once("files", self.files)
        return self


class Prompts(Config):
    """Texts that are put before queries and documents. The server is then asked with the same text before each query."""

    query: str = ""
    """Before each query, such as `query: `."""
    document: str = ""
    """Before each document, such as `passage: `."""


class Windows(Config):
    """How texts that are longer than `data.max_length` are read."""

    stride: Annotated[int, Field(ge=0, le=65535)] | None = None
    """How many tokens two windows share; by default a third of `data.max_length`."""
    aggregate: Literal["mean", "max"] = "mean"
    """How window logits are pooled: the mean, or for each label the largest, so that one window is enough to find
    it."""


def _as_templates(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _has_a_place(template: str) -> str:
    """Checks that a template has one place for the name of a class."""
    if template.count("{}") != 1 or template.replace("{}", "").count("{") or template.replace("{}", "").count("}"):
        raise ValueError(f"{template!r} given; a text with one {{}}, where the name of a class goes, is allowed")
    return template


Template = Annotated[str, AfterValidator(_has_a_place)]
Templates = Annotated[tuple[Template, ...], Field(min_length=1, max_length=1000), BeforeValidator(_as_templates)]


class DataConfig(Config):
    """Training and evaluation data."""

    LATER: ClassVar[tuple[str, ...]] = ("certify", "train_labels")

    path: Annotated[str, Field(min_length=1)]
    """One of: a Hub id; a file, or a folder of files (csv, tsv, json, jsonl, parquet, also .gz; for text-generation also txt; for
    text-to-text also two files with equal lines, such as train.en and train.de; for token-classification also conll; for
    question-answering also the JSON files of SQuAD); a folder or tar archive of images or sounds; `sklearn:digits`. Tasks that search
    documents read a folder in BEIR's layout: corpus.jsonl, queries.jsonl and qrels/test.tsv."""
    subset: str | None = None
    """Configuration of a Hub data set; ignored for local data."""
    columns: Columns = Columns()
    """Columns of text, text pair, negative, margin, tokens, question, context, source, target, image, audio and
    label."""
    header: bool = True
    """Whether the first line of tsv and csv files names the columns. false: `columns` are positions, counted from 0; single files may say
    otherwise in `files`."""
    quoting: Quoting | None = None
    """Quotes in tsv files: minimal, if fields that contain tabs, line ends or quotes stand in quotes, with quotes inside doubled, as pandas
    and csv writers write them; none, if quotes are part of the text. Default: none, and files that look like minimal are refused. csv files
    always have quotes, as in RFC 4180."""
    files: FilesConfig | None = None
    """Files of each split, relative to `path`. By default they are found by name (train.*, test.*, dev.* or validation.*). If
    text-generation has a single file, its last tenth becomes the test split."""
    certify: CertifyConfig | None = None
    """Rows for the certificate of a cascade; the stage `cascade` needs them."""
    prompts: Prompts | Templates | None = None
    """For tasks that search documents: prefixes of queries and documents, for models that were trained with them. Default for retrieval:
    the prompts `query` and `document` (or `passage`) that the model's config_sentence_transformers.json has. For image-text: one or several
    texts with `{}` where the name of a class goes; a class is the mean of their vectors. Default there: `a photo of a {}`."""
    candidates: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """For tasks that put candidates in order: how many of the first ones of each query are scored, by default 50."""
    negatives: Annotated[int, Field(ge=1, le=1000)] | None = None
    """How many negatives a row is trained with, at most. For sentence-embedding and sentence-triplets the first ones of each row; default:
    all. For retrieval documents that are not relevant, evenly spread over the first 50 that candidates/train.tsv has for a query; default:
    none."""
    multi_hot: bool | None = None
    """For multi-label-classification: whether a cell of labels is a vector with a 0 or 1 for each label of the model, in its order, rather
    than a list of labels. Default: vectors where every cell has 0 and 1 alone and as many as there are labels; an error where both is
    possible."""
    max_length: Annotated[int, Field(ge=8, le=65536)] = 128
    """Maximum tokens per row, including special tokens; longer rows are truncated, or read in `windows`. For text-generation the number of
    tokens per block, for text-to-text the maximum of source and of target. Ignored for images and sounds."""
    stride: Annotated[int, Field(ge=0, le=65535)] | None = None
    """For question-answering: how many tokens two windows of a context share, where it is longer than `max_length` leaves room for next to
    the question; by default a third of `max_length`."""
    windows: Windows | None = None
    """For text-classification and multi-label-classification of single texts: reads longer texts in windows of `max_length` tokens instead
    of only their beginnings. In training every window is a row with the label of its text; everywhere else a text has one answer, of all
    of its windows."""
    train_labels: bool = True
    """Whether the train rows have labels. false: for one class a row, they need no column of labels, and none is read: stages learn from a
    teacher alone. Rows with labels are then needed in both the validation and the test split."""
    keep_evaluation_rows: bool = False
    """Whether train rows with the content of an evaluation row (its texts, image, sound or source, whatever the label) stay in training and
    calibration. By default they are left out, since results on rows that were trained on say nothing of new ones; if they stay, the report
    says so next to every figure. Not for tasks that search documents, whose evaluation queries are never trained on."""
    max_seconds: Annotated[float, Field(gt=0, le=600)] | None = None
    """For models that read waveforms, which need it: the longest sound in seconds; of longer ones the beginning is read. Models that read
    spectrograms have one size, as preprocessor_config.json says, and ignore it."""
    max_expanded_gb: Annotated[float, Field(gt=0, le=1_000_000)] = 4.0
    """Maximum size of one compressed file (.gz, .tgz, parquet) when expanded, in 10^9 bytes."""

    @property
    def shared_tokens(self) -> int:
        """Tokens that two windows of a context, or of a long text, share."""
        given = self.stride if self.windows is None else self.windows.stride
        return self.max_length // 3 if given is None else given
