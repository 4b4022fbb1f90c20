"""Questions to a language model, one a line of a text file, as the token ids that the model reads.

A tokenizer with a chat template gets each question as the message of a user, as `compress generate` does; one without gets it as it is.

Left out: conversations of several messages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.core.errors import InputError
from compress.core.files import local, read_plain
from compress.core.shown import reason

MOST_BYTES = 10_000_000
"""Bytes of a file of questions."""
KEY = "export.generation.questions"


def read_questions(given: str) -> tuple[str, ...]:
    """Returns the lines of a text file that are not blank.

    Args:
        given: Path of the file, as the recipe says.

    Raises:
        InputError: The file cannot be read, is too large, is not UTF-8, or has no question in it.
    """
    path = local(given, KEY)
    try:
        text = read_plain(path, MOST_BYTES, f"{KEY}: {given}").decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{KEY}: {given} given, which cannot be read ({reason(error)}); give a UTF-8 file with one question a line"
        ) from error
    questions = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not questions:
        raise InputError(f"{KEY}: {given} given, which has no question in it; give a UTF-8 file with one question a line")
    return questions


def asked(tokenizer: Any, question: str, *, chat: bool = True) -> NDArray[np.int32]:
    """Returns the token ids of one question, int32 [P].

    Args:
        tokenizer: A tokenizer of Transformers.
        question: The text.
        chat: Whether it goes through the chat template, if there is one.
    """
    if not chat or getattr(tokenizer, "chat_template", None) is None:
        return np.array(tokenizer(question)["input_ids"], np.int32)
    message = [{"role": "user", "content": question}]
    return np.array(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"], np.int32)


def prompts_of(checkpoint: Path, questions: tuple[str, ...], tokens: int, longest: int | None) -> list[NDArray[np.int32]]:
    """Returns the token ids of questions, int32 [P] each.

    Args:
        checkpoint: Folder with the tokenizer.
        questions: The texts.
        tokens: Most tokens of an answer.
        longest: Most tokens that the model reads; None: any number.

    Raises:
        InputError: A question has no token, or leaves no room for its answer.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    found = [asked(tokenizer, question) for question in questions]
    for question, ids in zip(questions, found, strict=True):
        if not len(ids):
            raise InputError(f"{KEY}: {question:.40} has no token; give a question that the tokenizer knows")
        if longest is not None and len(ids) + tokens > longest:
            raise InputError(
                f"{KEY}: {question:.40} ... has {len(ids)} tokens, and an answer {tokens}; the model reads {longest}: "
                "give shorter questions, or fewer export.generation.tokens"
            )
    return found
