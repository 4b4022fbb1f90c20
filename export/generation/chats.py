"""Checks the chat template of a model before anything is trained: served prompts have to equal the prompts of Transformers.

Conversations are rendered by our reader of the folder (`foundation.standalone.chat_template`), and by the tokenizer that Transformers
loads from it. Both are Jinja, but each has its own names, filters and special tokens, and a template may read one that only the other has.

Left out: tools and documents, which no request can give.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.choices import Generation
from export.generation.prompts import Prompts
from export.generation.questions import KEY as QUESTIONS
from foundation.core.errors import InputError
from foundation.core.shown import shown
from foundation.core.stamps import Stamps
from foundation.measure.probes import CHATS
from foundation.models.config import most_tokens
from foundation.models.files import state_of
from foundation.models.folder import Checkpoint
from foundation.models.inputs.language import language_text
from foundation.models.inputs.questions import read_questions
from foundation.models.inputs.tokenizer import load_tokenizer
from foundation.models.inputs.tokenizer_file import from_class
from foundation.models.library import one_line
from foundation.standalone.chat_template import TemplateRefused
from foundation.standalone.language_text import LanguageText

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Chat = tuple[Mapping[str, str], ...]
KEY = "chat template of the model"
REMEDY = "correct chat_template.jinja in the folder of the model, or remove it"


def check_chats(folder: Path) -> tuple[str, ...]:
    """Compares the prompts of some conversations with the prompts of Transformers.

    Args:
        folder: Holds the tokenizer of a language model.

    Returns:
        A line about a template that takes no question, in Transformers either; requests with messages get it as an error.

    Raises:
        InputError: A prompt differs, or one of the two renders a conversation that the other refuses.
    """
    return _checked(folder, state_of(folder))


@lru_cache(maxsize=8)
def _checked(folder: Path, state: Stamps) -> tuple[str, ...]:
    del state  # part of the key: the candidates of a search have one folder
    text = language_text(folder)
    if not text.has_template:
        return ()
    library, refusals = _library(folder), list[str]()
    for chat in CHATS:
        before, ours, after = _of_library(library, chat), _ours(text, chat), _of_library(library, chat)
        refused = isinstance(ours, TemplateRefused)
        if refused and before is None:
            refusals.append(str(ours))
        elif refused or ours not in (before, after):  # a template may read the clock
            raise InputError(
                KEY,
                f"{shown(chat[-1]['content'])} becomes {_said(ours)} when served, and {_said(before)} in Transformers",
                "served prompts have to equal the prompts of Transformers",
                REMEDY,
            )
    if len(refusals) < len(CHATS):
        return ()
    return (f"{KEY}: takes no question ({refusals[0]}), in Transformers either: requests with messages end with this error",)


def check_questions(folder: Path, config: PreTrainedConfig, settings: Generation) -> None:
    """Encodes the questions that the engines will be asked.

    Args:
        folder: Holds the tokenizer of a decoder.
        config: Transformers config of the decoder.
        settings: Name the file of questions.

    Raises:
        InputError: The file cannot be read, the chat template does not take a question, or a question leaves no room for its answer.
    """
    assert settings.questions is not None, "there are questions"
    Prompts.of_questions(read_questions(settings.questions, QUESTIONS), settings, Checkpoint(folder), most_tokens(config))


def _library(folder: Path) -> Any:
    """Returns the tokenizer of Transformers: of the folder's own class, or of the generic one where that class cannot read the folder."""
    try:
        return from_class(folder)
    except InputError:  # `tokenizer_file` notes it
        return load_tokenizer(str(folder))


def _of_library(library: Any, chat: Chat) -> str | None:
    """Returns the prompt of a conversation in Transformers; None where the template refuses it."""
    try:
        prompt: str = library.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=True)
    except Exception:  # a template is a program of others: whatever it raises is its refusal
        return None
    return prompt


def _ours(text: LanguageText, chat: Chat) -> str | TemplateRefused:
    try:
        return text.apply_chat_template(chat)
    except TemplateRefused as error:
        return error


def _said(prompt: str | TemplateRefused | None) -> str:
    return shown(prompt) if isinstance(prompt, str) else "a refusal" if prompt is None else f"a refusal ({one_line(prompt)})"
