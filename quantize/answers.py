"""Calibration rows that a language model writes itself (self-calibration, https://arxiv.org/abs/2410.17170; the idea of LLM-QAT,
https://arxiv.org/abs/2305.17888).

What a model reads when it is used is mostly what it has written: chats in its own words, not the text that happens to be at hand. Its own
answers make such rows without further data.

    prompts       questions of a file in the chat format of the model, or the beginnings of calibration blocks
    answers       y ~ p(. | prompt), sampled one token at a time from the whole distribution at `temperature`
    rows          prompts and answers, one after the other, cut into blocks as long as the rows of the data

After all prompts have been answered, they are asked again with other random numbers, until there is text for all rows. The same model, rows
and seed give the same answers.

Not supported: models that do not fit into memory, and encoder-decoders.

Shape suffixes: b prompts of a batch, P tokens of a prompt, L tokens of a prompt with its answer.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from foundation.models.config import most_tokens
from foundation.models.folder import Checkpoint
from foundation.models.forward import device_of, modes_kept
from foundation.models.generation import answer_tokens, generate
from foundation.models.inputs.language import language_text
from foundation.models.inputs.questions import encoded_questions, read_questions
from foundation.models.library import quiet
from foundation.stage.context import Context
from foundation.standalone.preprocess import Row
from quantize.choices import Answers

if TYPE_CHECKING:
    from quantize.settings import QuantizeSettings

Tokens = NDArray[np.int32]
BATCH_SIZE = 32
"""Prompts that are answered at once; they are equally long, so that no text holds padding."""
WINDOW = 512
"""Prompts among which those of one length are looked for."""


def calibration_rows(stage: QuantizeSettings, source: Path, load: Callable[[], nn.Module], context: Context) -> list[Row]:
    """Returns the calibration rows of a stage: train rows, and the model's own answers where they are asked for.

    Args:
        stage: Says how many, and how many of them the model writes; there are fewer if there are not as many different train rows.
        source: The float checkpoint.
        load: Returns its model, on the device that computes; called only if it writes.
        context: Data, seed, progress.

    Raises:
        InputError: The questions cannot be read or asked.
    """
    rows, answers = stage.calibration.rows, stage.calibration.answers
    read = context.data.calibration(rows, context.seed).rows
    if answers is None:
        return read
    written = max(1, round(answers.share * rows))
    blocks = [row for row in read if isinstance(row, np.ndarray)]
    length = max(map(len, blocks))
    prompts = prompts_of(answers, blocks, source, length, questions_key(stage))
    with context.progress.bar(f"{stage.title}: the model's answers", written * length) as advance:
        own = written_rows(load(), prompts, answers, written, length, context.seed, advance)
    return [*read[: rows - written], *own]


def questions_key(stage: QuantizeSettings) -> str:
    """Returns where the recipe names the file of questions, for error messages."""
    return f"{stage.key}.calibration.answers.questions"


def prompts_of(answers: Answers, blocks: Sequence[Tokens], source: Path, length: int, key: str) -> list[Tokens]:
    """Returns the prompts, int32 [P] each: of questions, or the first tokens of blocks.

    Args:
        answers: The settings.
        blocks: Calibration rows, int32 each.
        source: Folder with the tokenizer.
        length: Tokens of the longest row.
        key: Where the recipe names the file of questions, for error messages.

    Raises:
        InputError: The questions cannot be read, or one leaves no room for an answer in what the model reads.
    """
    if answers.questions is None:
        given = max(1, min(round(answers.prompt * length), length - 1))
        return [block[:given] for block in blocks if len(block) >= given]
    questions, longest = read_questions(answers.questions, key), most_tokens(Checkpoint(source).config)
    found = encoded_questions(language_text(source), questions, answers.tokens, longest, key)
    return sorted(found, key=_order)


def written_rows(
    model: nn.Module,
    prompts: Sequence[Tokens],
    answers: Answers,
    rows: int,
    length: int,
    seed: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[Row]:
    """Returns blocks of prompts and sampled answers, int32 [length] each.

    Args:
        model: A causal language model of Transformers; left in the mode that it is in.
        prompts: Token ids, int32 [P] each.
        answers: How many tokens an answer has, and the temperature.
        rows: Number of blocks.
        length: Tokens of a block.
        seed: Seed of the samples.
        advance: Called with the number of tokens that were added.
    """
    device = device_of(model)
    parts, have = list[Tokens](), 0
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad(), quiet(), modes_kept(model):
        torch.manual_seed(seed)
        model.eval()
        for batch in _turns(prompts):
            for text in _answered(model, batch, answers, device):
                parts.append(text)
                advance(min(len(text), max(0, rows * length - have)))
                have += len(text)
            if have >= rows * length:
                break
    whole = np.concatenate(parts)[: rows * length]
    return list(whole.reshape(rows, length))


def _turns(prompts: Sequence[Tokens]) -> Iterator[Sequence[Tokens]]:
    """Yields batches of prompts of one length, all of them in turn, again and again."""
    for start in itertools.cycle(range(0, len(prompts), WINDOW)):
        groups: dict[int, list[Tokens]] = {}
        for prompt in prompts[start : start + WINDOW]:
            groups.setdefault(len(prompt), []).append(prompt)
        for same in groups.values():
            yield from (same[first : first + BATCH_SIZE] for first in range(0, len(same), BATCH_SIZE))


def _answered(model: nn.Module, prompts: Sequence[Tokens], answers: Answers, device: torch.device) -> Iterator[Tokens]:
    """Yields each prompt with its answer up to its end token, int32 [L]."""
    ends = answer_tokens(model).ends if answers.questions is not None else ()
    ids_bP = torch.from_numpy(np.stack(prompts).astype(np.int64)).to(device)
    sampled = {"max_new_tokens": answers.tokens, "do_sample": True, "temperature": answers.temperature}
    found_bL = generate(model, ends, sampled, input_ids=ids_bP, attention_mask=torch.ones_like(ids_bP)).cpu().numpy().astype(np.int32)
    given = ids_bP.shape[1]
    for row in found_bL:
        ended = np.flatnonzero(np.isin(row[given:], ends))
        yield row[: given + ended[0] + 1] if len(ended) else row


def _order(ids: Tokens) -> bytes:
    """Orders questions by content, so that those that come first do not depend on the order of the file."""
    return hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
