"""Questions to a language model, one a line of a text file, as the token ids that the model reads.

A tokenizer with a chat template gets each question as the message of a user, as `compress generate` does; one without gets it as it is.

Left out: conversations of several messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foundation.core.errors import InputError
from foundation.core.files import local, read_plain
from foundation.core.shown import reason
from foundation.standalone.chat_template import TemplateRefused
from foundation.standalone.language_text import LanguageText

MOST_BYTES = 10_000_000
"""Bytes of a file of questions."""


def read_questions(name: str, key: str) -> tuple[str, ...]:
    """Returns the lines of a text file that are not blank.

    Args:
        name: Path of the file, as the recipe says.
        key: Key path of the recipe, for error messages.

    Raises:
        InputError: The file cannot be read, is too large, is not UTF-8, or has no question in it.
    """
    path = local(name, key)
    try:
        text = read_plain(path, MOST_BYTES, f"{key}: {name}").decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            key, f"{name} given, which cannot be read ({reason(error)})", remedy="give a UTF-8 file with one question a line"
        ) from error
    questions = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not questions:
        raise InputError(key, f"{name} given, which has no question in it", remedy="give a UTF-8 file with one question a line")
    return questions


def encode_question(text: LanguageText, question: str, *, chat: bool = True) -> NDArray[np.int32]:
    """Returns the token ids of one question, int32 [P].

    Args:
        text: The reader of the model's text.
        question: The text.
        chat: Whether it goes through the chat template, if there is one.

    Raises:
        InputError: The chat template does not take it.
    """
    if not chat or not text.has_template:
        return np.array(text.encode(question), np.int32)
    try:
        return np.array(text.chat([{"role": "user", "content": question}]), np.int32)
    except TemplateRefused as error:
        raise InputError(
            "chat template of the model", f"{error}", remedy="correct chat_template.jinja in the folder of the model, or remove it"
        ) from error


def encoded_questions(text: LanguageText, questions: Sequence[str], tokens: int, longest: int | None, key: str) -> list[NDArray[np.int32]]:
    """Returns the token ids of questions that a model is to answer, int32 [P] each.

    Args:
        text: The reader of the model's text.
        questions: The texts.
        tokens: Most tokens of an answer.
        longest: Most tokens that the model reads; None: any number.
        key: Key path of the file of questions; `tokens` stands next to it.

    Raises:
        InputError: A question has no token, or leaves no room for its answer, or the chat template does not take it.
    """
    found = [encode_question(text, question) for question in questions]
    for question, ids in zip(questions, found, strict=True):
        if not len(ids):
            raise InputError(key, f"{question:.40} has no token", remedy="give a question that the tokenizer knows")
        if longest is not None and len(ids) + tokens > longest:
            raise InputError(
                key,
                f"{question:.40} ... has {len(ids)} tokens, and an answer {tokens}",
                f"the model reads {longest}",
                f"give shorter questions, or fewer {key.rpartition('.')[0]}.tokens",
            )
    return found
