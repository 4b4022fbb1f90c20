"""Questions to the engines of a language model, as the token ids that they read (`foundation.models.inputs.questions`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foundation.core.errors import InputError
from foundation.models.folder import Checkpoint
from foundation.models.inputs.language import language_text
from foundation.models.inputs.questions import encode_question

KEY = "export.generation.questions"
"""Where the recipe names the file."""


def prompts_of(checkpoint: Checkpoint, questions: tuple[str, ...], tokens: int, longest: int | None) -> list[NDArray[np.int32]]:
    """Returns the token ids of questions, int32 [P] each.

    Args:
        checkpoint: Folder with the tokenizer.
        questions: The texts.
        tokens: Most tokens of an answer.
        longest: Most tokens that the model reads; None: any number.

    Raises:
        InputError: A question has no token, or leaves no room for its answer, or the chat template does not take it.
    """
    text = language_text(checkpoint.folder)
    found = [encode_question(text, question) for question in questions]
    for question, ids in zip(questions, found, strict=True):
        if not len(ids):
            raise InputError(KEY, f"{question:.40} has no token", remedy="give a question that the tokenizer knows")
        if longest is not None and len(ids) + tokens > longest:
            raise InputError(
                KEY,
                f"{question:.40} ... has {len(ids)} tokens, and an answer {tokens}",
                f"the model reads {longest}",
                "give shorter questions, or fewer export.generation.tokens",
            )
    return found
