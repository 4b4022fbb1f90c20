"""Reads the text of a language model as its tokenizer of Transformers says it is read: ids, chat template, spaces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foundation.models.inputs.tokenizer import load_tokenizer
from foundation.standalone.language_text import LanguageText, TextSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def language_text(folder: Path) -> LanguageText:
    """Returns the reader of the text of a checkpoint.

    Raises:
        InputError: The tokenizer cannot be loaded.
    """
    return of_transformers(load_tokenizer(str(folder)))


def of_transformers(tokenizer: PreTrainedTokenizerBase) -> LanguageText:
    """Returns the reader of the text of a tokenizer of Transformers; of several chat templates its default one is taken."""
    templates, backend = tokenizer.chat_template, tokenizer.backend_tokenizer
    cleans = tokenizer.clean_up_tokenization_spaces
    if type(backend.model).__name__ == "BPE":  # Transformers leaves the spaces of such a tokenizer unless both settings say so
        cleans = cleans and tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    settings = TextSettings(
        chat_template=templates.get("default") if isinstance(templates, dict) else templates,
        special_tokens=dict(tokenizer.special_tokens_map),
        clean_up=bool(cleans),
    )
    return LanguageText(backend, settings)
