"""Questions to the engines of a language model, as the token ids that they read (`foundation.models.inputs.questions`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foundation.models.folder import Checkpoint
from foundation.models.inputs.language import language_text
from foundation.models.inputs.questions import encoded_questions

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
    return encoded_questions(language_text(checkpoint.folder), questions, tokens, longest, KEY)
