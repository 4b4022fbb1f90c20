"""The table of tasks: one row of facts for each. Other code asks for a fact, never for a name.

    TASKS[task].generates       not  task in ("text-generation", "text-to-text")

To add a task, add a row to `TASKS`: recipes, their schema, `compress init`, `compress list` and the messages follow from it. The row is all
there is to write where modality, answer, columns and metrics exist already. What is new goes to others of its kind:

    a column of the data   a field of `Columns` in compress/data/config.py
    a metric               a row of `METRICS` in compress/measure/metrics.py
    an answer              a file and a row in compress/answers (how it is compared), and in compress/training/losses (how it is learned)

The answers that there are:

    class        one of the labels of the data; logits [n, C], labels int64 [n]
    labels       any number of the labels of the data; logits [n, C], labels bool [n, C] (`compress.core.label_sets`)
    tags         a tag for each word; logits [n, L, C], labels int32 [n, C + W, 2] (`compress.core.tags`)
    transcript   the text that is spoken; logits [n, F, V] of frames, labels int32 [n, 2, 1 + T] (`compress.core.transcripts`)
    span         where the answer to a question stands in a text; logits [n, L, 2] of its windows, labels int32 [n, 1 + G, W, 2]
                 (`compress.core.spans`)
    value        a number; logits [n, 1], labels float32 [n]; where candidates of queries are put in order [n, 13]
                 (`compress.core.candidates`)
    tokens       the next token at every position of a block, or of a target behind its source; answers [n, T, 2] and labels int32 [n, T]
                 (`compress.core.next_token`)
    vector       a vector for every single text; vectors [n, D], labels float32 [n, 2]: which two texts form a pair, and its score
                 (`compress.core.vectors`); of pairs and triplets without scores [n, 4] (`compress.core.text_groups`); where documents
                 are searched [n, 2 + 2 k]: query or document, and its judgements (`compress.core.relevance`); where images are found by
                 words [n, 3]: image or text, and its class
                 (`compress.core.zero_shot`) or the image that a caption belongs to (`compress.core.captions`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from compress.core.named import Named, one_of

SCORE: tuple[str, ...] = ("score",)
"""The one "label" of a task that answers with a value."""
VECTOR: tuple[str, ...] = ("vector",)
"""The same of a task that answers with a vector."""


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


@dataclass(frozen=True)
class Facts:
    """All that sets a task apart."""

    modality: Literal["text", "image", "audio"]
    """What its rows are made of."""
    answer: Literal["class", "labels", "tags", "transcript", "span", "value", "tokens", "vector"]
    """What a model answers to a row."""
    columns: tuple[str, ...]
    """What it reads of a data set: fields of `compress.data.config.Columns`, what rows have for labels last."""
    metrics: tuple[str, ...]
    """Rows of `compress.measure.metrics.METRICS`, in the order of the report. The first is the primary one: goals are about it."""
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
    (`compress.models.heads.towers`)."""

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
    def several(self) -> bool:
        """Whether any number of labels may hold for a row."""
        return self.answer == "labels"

    @property
    def fits_thresholds(self) -> bool:
        """Whether thresholds that are chosen on selection rows decide what holds."""
        return self.several or self.finds_spans

    @property
    def orders(self) -> bool:
        """Whether it puts candidates of a query in order."""
        return self.searches and self.answer == "value"

    @property
    def regresses(self) -> bool:
        """Whether it answers with a number that is in the data."""
        return self.answer == "value" and not self.searches

    @property
    def needs_labels(self) -> bool:
        """Whether rows have labels of their own, which captions and negatives are; text to generate is its own label."""
        return "label" in self.columns or self.captioned or self.needs_negatives


TASKS: Mapping[str, Facts] = {
    "text-classification": Facts(
        modality="text",
        answer="class",
        columns=("text", "text_pair", "label"),
        metrics=("accuracy", "f1", "matthews"),
        auto_class="AutoModelForSequenceClassification",
        problem_type="single_label_classification",
        pipeline_tag="text-classification",
        example=Example(
            about="A sentiment classifier in int8, served by Triton.",
            name="my-classifier",
            model="philschmid/MiniLM-L6-H384-uncased-sst2",
            head="keep",
            data="nyu-mll/glue",
            subset="sst2",
            columns="{text: sentence, label: label}   # text_pair: for sentence pairs",
        ),
    ),
    "multi-label-classification": Facts(
        modality="text",
        answer="labels",
        columns=("text", "text_pair", "label"),
        metrics=("micro_f1", "macro_f1", "exact_match"),
        auto_class="AutoModelForSequenceClassification",
        problem_type="multi_label_classification",
        pipeline_tag="text-classification",
        example=Example(
            about="A classifier that finds any number of labels, in int8, served by Triton.",
            name="my-labels",
            model="nreimers/MiniLM-L6-H384-uncased",
            data="google-research-datasets/go_emotions",
            subset="simplified",
            columns="{text: text, label: labels}",
        ),
    ),
    "token-classification": Facts(
        modality="text",
        answer="tags",
        columns=("tokens", "label"),
        metrics=("entity_f1", "entity_precision", "entity_recall"),
        auto_class="AutoModelForTokenClassification",
        problem_type=None,
        pipeline_tag="token-classification",
        counts="sentences",
        label_column="labels",
        example=Example(
            about="A finder of named entities in int8, served by Triton.",
            name="my-entities",
            model="nreimers/MiniLM-L6-H384-uncased",
            data="lhoestq/conll2003",
            columns="{tokens: tokens, label: ner_tags}",
        ),
    ),
    "question-answering": Facts(
        modality="text",
        answer="span",
        columns=("question", "context", "label"),
        metrics=("answer_f1", "answer_exact_match", "has_answer_f1", "no_answer_f1"),
        auto_class="AutoModelForQuestionAnswering",
        problem_type=None,
        pipeline_tag="question-answering",
        counts="questions",
        label_column="answers",
        example=Example(
            about="Answers to questions from a text in int8, served by Triton.",
            name="my-answers",
            model="nreimers/MiniLM-L6-H384-uncased",
            data="rajpurkar/squad",
            columns="{question: question, context: context, label: answers}",
        ),
    ),
    "text-regression": Facts(
        modality="text",
        answer="value",
        columns=("text", "text_pair", "label"),
        metrics=("pearson", "spearman"),
        auto_class="AutoModelForSequenceClassification",
        problem_type="regression",
        pipeline_tag="text-classification",
        example=Example(
            about="Sentence similarity in int8, served by Triton.",
            name="my-regressor",
            model="nreimers/MiniLM-L6-H384-uncased",
            data="nyu-mll/glue",
            subset="stsb",
            columns="{text: sentence1, text_pair: sentence2, label: label}",
        ),
    ),
    "image-text": Facts(  # before the other tasks of vectors: `task_of` takes the first whose classes have that of a checkpoint
        modality="image",
        answer="vector",
        columns=("image", "label"),
        metrics=("accuracy", "top_5"),
        auto_class="AutoModelForZeroShotImageClassification",
        problem_type=None,
        pipeline_tag="zero-shot-image-classification",
        counts="images",
        two_towers=True,
        example=Example(
            about="Vectors of images and of texts in int8, from two towers that Triton serves.",
            name="my-image-text",
            model="openai/clip-vit-base-patch32",
            head="keep",
            data="uoft-cs/cifar10",
            columns="{image: img, label: label}",
        ),
    ),
    "image-text-retrieval": Facts(
        modality="image",
        answer="vector",
        columns=("image", "text"),
        metrics=(
            "mean_recall",
            *("text_to_image_recall@1", "text_to_image_recall@5", "text_to_image_recall@10"),
            *("image_to_text_recall@1", "image_to_text_recall@5", "image_to_text_recall@10"),
        ),
        auto_class="AutoModelForZeroShotImageClassification",
        problem_type=None,
        pipeline_tag="zero-shot-image-classification",
        counts="images",
        two_towers=True,
        example=Example(
            about="Images found by captions, and captions by images, in int8: two towers that Triton serves.",
            name="my-captions",
            model="openai/clip-vit-base-patch32",
            head="keep",
            data="umaru97/flickr30k_train_val_test",
            columns="{image: image, text: caption}   # a caption, or a list of them",
        ),
    ),
    "sentence-embedding": Facts(
        modality="text",
        answer="vector",
        columns=("text", "text_pair", "negative", "label"),
        metrics=("spearman", "pearson"),
        auto_class="AutoModel",
        problem_type=None,
        pipeline_tag="sentence-similarity",
        needs_pairs=True,
        counts="pairs",
        example=Example(
            about="Vectors of sentences in int8, served by Triton.",
            name="my-embeddings",
            model="sentence-transformers/all-MiniLM-L6-v2",
            head="keep",
            data="nyu-mll/glue",
            subset="stsb",
            columns="{text: sentence1, text_pair: sentence2, label: label}   # a score of how similar they are",
        ),
    ),
    "retrieval": Facts(
        modality="text",
        answer="vector",
        columns=("text", "label"),
        metrics=("ndcg@10", "mrr@10", "recall@100"),
        auto_class="AutoModel",
        problem_type=None,
        pipeline_tag="sentence-similarity",
        counts="queries",
        searches=True,
        example=Example(
            about="Vectors for searching documents in int8, served by Triton.",
            name="my-search",
            model="sentence-transformers/all-MiniLM-L6-v2",
            head="keep",
            data="beir/scifact",
            columns="",
        ),
    ),
    "sentence-triplets": Facts(
        modality="text",
        answer="vector",
        columns=("text", "text_pair", "negative"),
        metrics=("accuracy",),
        auto_class="AutoModel",
        problem_type=None,
        pipeline_tag="sentence-similarity",
        needs_pairs=True,
        counts="triplets",
        example=Example(
            about="Vectors that tell what says the same from what does not, in int8, served by Triton.",
            name="my-triplets",
            model="sentence-transformers/all-MiniLM-L6-v2",
            head="keep",
            data="sentence-transformers/all-nli",
            subset="triplet",
            columns="{text: anchor, text_pair: positive, negative: negative}",
        ),
    ),
    "reranking": Facts(
        modality="text",
        answer="value",
        columns=("text", "text_pair", "label"),
        metrics=("ndcg@10", "mrr@10"),
        auto_class="AutoModelForSequenceClassification",
        problem_type="regression",
        pipeline_tag="text-ranking",
        counts="queries",
        searches=True,
        example=Example(
            about="A reranker in int8, served by Triton.",
            name="my-reranker",
            model="cross-encoder/ms-marco-MiniLM-L6-v2",
            head="keep",
            data="beir/scifact",
            columns="",
        ),
    ),
    "text-generation": Facts(
        modality="text",
        answer="tokens",
        columns=("text",),
        metrics=("perplexity", "accuracy"),
        auto_class="AutoModelForCausalLM",
        problem_type=None,
        pipeline_tag="text-generation",
        counts="tokens",
        example=Example(
            about="A small language model in int8.",
            name="my-language-model",
            data="Salesforce/wikitext",
            subset="wikitext-2-raw-v1",
            columns="{text: text}",
        ),
    ),
    "text-to-text": Facts(
        modality="text",
        answer="tokens",
        columns=("source", "target"),
        metrics=("perplexity", "accuracy"),
        auto_class="AutoModelForSeq2SeqLM",
        problem_type=None,
        pipeline_tag="text2text-generation",
        counts="tokens",
        encoder_decoder=True,
        example=Example(
            about="A small translator from English to German in int8.",
            name="my-translator",
            data="bentrevett/multi30k",
            columns="{source: en, target: de}",
        ),
    ),
    "image-classification": Facts(
        modality="image",
        answer="class",
        columns=("image", "label"),
        metrics=("accuracy",),
        auto_class="AutoModelForImageClassification",
        problem_type="single_label_classification",
        pipeline_tag="image-classification",
        example=Example(
            about="An image classifier in int8, served by Triton.",
            name="my-images",
            model="WinKawaks/vit-tiny-patch16-224",
            data="uoft-cs/cifar10",
            columns="{image: img, label: label}",
        ),
    ),
    "audio-classification": Facts(
        modality="audio",
        answer="class",
        columns=("audio", "label"),
        metrics=("accuracy",),
        auto_class="AutoModelForAudioClassification",
        problem_type="single_label_classification",
        pipeline_tag="audio-classification",
        example=Example(
            about="A classifier of sounds in int8, served by Triton.",
            name="my-sounds",
            model="facebook/wav2vec2-base",
            data="mteb/free-spoken-digit-dataset",
            columns="{audio: audio, label: label}",
        ),
    ),
    "speech-recognition": Facts(
        modality="audio",
        answer="transcript",
        columns=("audio", "label"),
        metrics=("wer", "cer"),
        auto_class="AutoModelForCTC",
        problem_type=None,
        pipeline_tag="automatic-speech-recognition",
        label_column="text",
        example=Example(
            about="A recognizer of speech in int8, served by Triton.",
            name="my-transcripts",
            model="facebook/wav2vec2-base",
            data="google/fleurs",
            subset="en_us",
            columns="{audio: audio, label: transcription}",
        ),
    ),
}

Task = Annotated[str, Named(TASKS)]
"""The name of a task; in a recipe it has to be a row of `TASKS`."""


def tasks_with(fact: Callable[[Facts], bool]) -> str:
    """Returns the names of the tasks that a fact holds for, for messages: "a, b or c"."""
    return one_of([task for task, row in TASKS.items() if fact(row)])


def num_classes(task: Task, labels: Sequence[str]) -> int | None:
    """Returns the number of classes, by the names of the labels of the data; None for a task that has none."""
    return len(labels) if TASKS[task].classifies else None
