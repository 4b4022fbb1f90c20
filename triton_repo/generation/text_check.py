"""Sends texts and conversations to a served language model, as its users do, and compares tokens and answers with Transformers.

The tokens of answers are compared elsewhere (`triton_repo.generation.check`), to prompts of token ids, which skip the server's tokenizer.
Here the server gets the same prompt twice, one request after the other:

    as text or messages    PROMPT_TOKENS and the answer of the server
    as token ids           the ids of Transformers for the same text, from the same folder

The number of tokens and the answers have to be equal, and the text of the answer has to be what Transformers decodes its tokens to. The
server reads tokenizer.json with the tokenizers library, and chat.json; Transformers reads the files of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foundation.measure.probes import CHATS, PROBES
from foundation.models.inputs.tokenizer import load_tokenizer
from triton_repo.client import ServedWrong
from triton_repo.generation.client import Prompted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER_TOKENS = 4
OWN_TEXTS = 8
"""Texts of evaluation rows that are sent besides `PROBES`."""


@dataclass(frozen=True)
class Reply:
    """Answer of the server."""

    prompt_tokens: int
    tokens: list[int]
    text: str


Ask = Callable[[Prompted], Reply]
"""Sends a prompt."""


@dataclass(frozen=True)
class Prompt:
    """A prompt in two spellings."""

    inputs: Prompted
    """`text` or `messages`."""
    ids: list[int]


def check_texts(name: str, folder: Path, rows: Sequence[NDArray[np.int32]], most: int, *, chats: bool, ask: Ask) -> int:
    """Sends texts and conversations to a served model, and checks its answers.

    Args:
        name: Name of the model.
        folder: Holds its tokenizer.
        rows: Prompts of evaluation rows, int32 [P] each.
        most: Most tokens of a prompt; longer ones are left out.
        chats: Whether the model takes conversations.
        ask: Sends a prompt to the server.

    Returns:
        The number of prompts.

    Raises:
        ServedWrong: The server tokenizes a prompt or decodes an answer differently from Transformers; the message shows it.
    """
    tokenizer, count = load_tokenizer(str(folder)), 0
    for prompt in prompts(tokenizer, rows, chats=chats):
        if 0 < len(prompt.ids) <= most:
            _compare(name, prompt, tokenizer, ask)
            count += 1
    return count


def prompts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[NDArray[np.int32]], *, chats: bool) -> Iterator[Prompt]:
    """Yields the prompts: `PROBES`, texts of evaluation rows, and the `CHATS` that the template accepts, if the model takes
    conversations."""
    chosen = [rows[at] for at in np.unique(np.linspace(0, len(rows) - 1, min(OWN_TEXTS, len(rows))).round().astype(int))]
    for text in (*PROBES, *(tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in chosen)):
        if "\0" not in text:
            yield Prompt({"text": text}, list(tokenizer(text)["input_ids"]))
    for messages in CHATS if chats and tokenizer.chat_template is not None else ():
        try:
            made = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        except Exception:  # whatever a template raises, such messages are not for it
            continue
        yield Prompt({"messages": list(messages)}, list(made["input_ids"]))


def _compare(name: str, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, ask: Ask) -> None:
    by_text, by_ids = ask(prompt.inputs), ask({"ids": prompt.ids})
    shown = f"{next(iter(prompt.inputs.values()))!r:.120}"
    if (by_text.prompt_tokens, by_text.tokens) != (len(prompt.ids), by_ids.tokens):
        raise ServedWrong(
            f"model {name} in Triton: {shown} is read otherwise than Transformers reads it: {by_text.prompt_tokens} tokens answered with "
            f"{by_text.tokens} in place of {len(prompt.ids)} tokens answered with {by_ids.tokens}"
        )
    expected = tokenizer.decode(by_text.tokens, skip_special_tokens=True)
    if by_text.text != expected:
        raise ServedWrong(
            f"model {name} in Triton: tokens {by_text.tokens} are written as {by_text.text!r:.80}; Transformers writes {expected!r:.80}"
        )
