"""The table of tasks: one row of facts for each. Other code asks for a fact, never for a name.

    TASKS[task].generates       not  task in ("text-generation", "text-to-text")

To add a task, add a row to `TASKS`: recipes, their schema, `compress init`, `compress list` and the messages follow from it. The row is all
there is to write where modality, answer, columns and metrics exist already. What is new goes to others of its kind:

    a column of the data   a field of `Columns` in foundation/data/config.py
    a metric               a row of `METRICS` in foundation/measure/metrics.py
    an answer              a file in foundation/labels (its labels, and how it is compared), and a file and a row in
                           foundation/training/losses (how it is learned)

Shapes of answers and labels stand in the file of each: `classes`, `label_sets`, `tags`, `transcripts`, `spans`, `value`, `next_token` and
`vector` of foundation/labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

from foundation.core.named import Named, one_of
from foundation.labels.candidates import Candidates
from foundation.labels.captions import Captions
from foundation.labels.classes import ClassAnswer
from foundation.labels.facts import Example, Facts
from foundation.labels.label_sets import SetAnswer
from foundation.labels.next_token import TokenAnswer
from foundation.labels.relevance import Judged
from foundation.labels.spans import SpanAnswer
from foundation.labels.tags import TagAnswer
from foundation.labels.transcripts import TranscriptAnswer
from foundation.labels.value import ValueAnswer
from foundation.labels.vector import VectorAnswer
from foundation.labels.zero_shot import ImagesAndTexts

TASKS: Mapping[str, Facts] = {
    "text-classification": Facts(
        modality="text",
        answer=ClassAnswer(),
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
        answer=SetAnswer(),
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
        answer=TagAnswer(),
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
        answer=SpanAnswer(),
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
        answer=ValueAnswer(),
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
    "image-text": Facts(  # before the other tasks of vectors: `task_of` takes the first one that has the class of a checkpoint
        modality="image",
        answer=VectorAnswer(ImagesAndTexts),
        columns=("image", "label"),
        metrics=("accuracy", "top_5"),
        auto_class="AutoModelForZeroShotImageClassification",
        problem_type=None,
        pipeline_tag="zero-shot-image-classification",
        counts="images",
        example=Example(
            about="Vectors of images and of texts in int8, from two towers that Triton serves.",
            name="my-image-text",
            model="openai/clip-vit-base-patch32",
            head="keep",
            data="uoft-cs/cifar10",
            columns="{image: img, label: label}",
            where="Hub id, a folder split/class/file.jpg, or tar.gz archives of such folders",
            more='prompts: ["a photo of a {}"]   # what is said of a class; of several texts the mean counts',
        ),
    ),
    "image-text-retrieval": Facts(
        modality="image",
        answer=VectorAnswer(Captions),
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
        example=Example(
            about="Images found by captions, and captions by images, in int8: two towers that Triton serves.",
            name="my-captions",
            model="openai/clip-vit-base-patch32",
            head="keep",
            data="umaru97/flickr30k_train_val_test",
            columns="{image: image, text: caption}   # a caption, or a list of them",
            where="Hub id, or a folder of csv, tsv, jsonl or parquet with images or their paths",
        ),
    ),
    "sentence-embedding": Facts(
        modality="text",
        answer=VectorAnswer(),
        columns=("text", "text_pair", "negative", "margin", "label"),
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
        answer=VectorAnswer(Judged),
        columns=("text", "label"),
        metrics=("ndcg@10", "mrr@10", "recall@100"),
        auto_class="AutoModel",
        problem_type=None,
        pipeline_tag="sentence-similarity",
        counts="queries",
        example=Example(
            about="Vectors for searching documents in int8, served by Triton.",
            name="my-search",
            model="sentence-transformers/all-MiniLM-L6-v2",
            head="keep",
            data="beir/scifact",
            columns="",
            more='# prompts: {query: "query: ", document: "passage: "}   # for models that were trained with them',
        ),
    ),
    "sentence-triplets": Facts(
        modality="text",
        answer=VectorAnswer(),
        columns=("text", "text_pair", "margin", "negative"),
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
        answer=ValueAnswer(Candidates),
        columns=("text", "text_pair", "label"),
        metrics=("ndcg@10", "mrr@10"),
        auto_class="AutoModelForSequenceClassification",
        problem_type="regression",
        pipeline_tag="text-ranking",
        counts="queries",
        example=Example(
            about="A reranker in int8, served by Triton.",
            name="my-reranker",
            model="cross-encoder/ms-marco-MiniLM-L6-v2",
            head="keep",
            data="beir/scifact",
            columns="",
            more="candidates: 50   # that a first search found for each query: candidates/test.tsv of the folder",
        ),
    ),
    "text-generation": Facts(
        modality="text",
        answer=TokenAnswer(),
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
        answer=TokenAnswer(),
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
        answer=ClassAnswer(),
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
        answer=ClassAnswer(),
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
        answer=TranscriptAnswer(),
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
    # further tasks go above this line
}

Task = Annotated[str, Named(TASKS)]
"""The name of a task; in a recipe it has to be a row of `TASKS`."""


def tasks_with(fact: Callable[[Facts], bool]) -> str:
    """Returns the names of the tasks that a fact holds for, for messages: "a, b or c"."""
    return one_of([task for task, row in TASKS.items() if fact(row)])


def num_classes(task: Task, labels: Sequence[str]) -> int | None:
    """Returns the number of classes, by the names of the labels of the data; None for a task that has none."""
    return len(labels) if TASKS[task].answer.classifies else None
