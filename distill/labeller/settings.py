"""Settings of a large language model that labels texts: part of the recipe, read without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from foundation.core.config import Config

Calibration = Literal["none", "contextual", "batch"]
Fit = Literal["none", "temperature", "platt"]


def _as_words(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        str(label) if isinstance(label, int) and not isinstance(label, bool) else label: [words] if isinstance(words, str) else words
        for label, words in value.items()
    }


Word = Annotated[str, Field(min_length=1, max_length=200)]
Words = Annotated[tuple[Word, ...], Field(min_length=1, max_length=100)]


class Writing(Config):
    """Training texts that the labeller writes."""

    rows: Annotated[int, Field(ge=1, le=1_000_000)]
    """Texts to write for each label, before the filter."""
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Nucleus sampling: share of the probability that tokens are drawn from."""
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 48
    """Most tokens of a text; a text that does not end by then is left out."""
    min_probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    """A text is kept if the labeller answers with the label that it was to write for, with at least this probability."""


class Labeller(Config):
    """A large language model that labels texts by the probabilities of label words."""

    path: Annotated[str, Field(min_length=1)] | None = None
    """Hub id or folder of a causal language model."""
    url: Annotated[str, Field(pattern=r"^https?://[^\s@]+$")] | None = None
    """Instead of `path`, a server with the API of OpenAI, such as http://127.0.0.1:8000/v1. It has to return log-probabilities."""
    model: Annotated[str, Field(min_length=1)] | None = None
    """With `url`, the name of the model there."""
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """With `url`, the environment variable with the key of the server. The key is not stored. Absent: no key."""
    prompt: Annotated[str, Field(min_length=1)]
    """YAML file of the prompts: templates, few-shot examples, and how to ask for texts (`docs/how-to/label-with-a-language-model.md`)."""
    labels: Annotated[dict[str, Words], Field(min_length=2), BeforeValidator(_as_words)]
    """Words of each class (verbalizer): one, or a list. The probability of a class is the mean over its words, relative to the other
    classes."""
    length_normalized: bool = False
    """Divides the log-probability of a word by its number of tokens. false: the probability that the model writes the word, lower for words
    of more tokens, which calibration corrects."""
    orders: Annotated[int, Field(ge=1, le=100)] = 1
    """Orders of the few-shot examples that each template is asked with; the first is the order of the file. Probabilities are averaged."""
    calibration: Calibration = "batch"
    """Divides the probabilities by the model's bias, without labels. batch: its mean answer to the training rows, for classes of about
    equal frequency; contextual: its answers to the texts `N/A`, `[MASK]` and none; none: no calibration."""
    fit: Fit = "none"
    """Fits the probabilities to the labels of the selection rows. temperature: one scale; platt: a scale and an offset for each class.
    none: no label is read."""
    min_agreement: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Leaves out train rows for which a smaller share of the prompts agrees with the averaged label. 0: all rows are used."""
    write: Writing | None = None
    """Adds texts that the model writes for each label, with `path` or `url` as for labels; the prompt file needs `write`."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.url is None):
            raise ValueError("give either path (a model) or url (a server)")
        if (self.url is None) != (self.model is None):
            raise ValueError("model and url go together: the name of the model, and its server")
        if self.key_variable is not None and self.url is None:
            raise ValueError(f"key_variable: {self.key_variable} given without url; leave it out")
        return self

    @property
    def reads_labels(self) -> bool:
        """Whether labels of selection rows are read."""
        return self.fit != "none"
