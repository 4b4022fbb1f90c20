"""Prompt tuning and P-tuning: a few virtual tokens before every text are learned, and the model stays as it is.

    x  <-  p_1 ... p_k x_1 ... x_n              embeddings of virtual tokens, then of the tokens of the text
    prompt tuning   p is learned itself         Lester et al. 2021, https://arxiv.org/abs/2104.08691
    P-tuning        p = MLP(e) or LSTM(e)       Liu et al. 2021, https://arxiv.org/abs/2103.10385; e and the network are learned

The head of a classifier is trained whole, as with adapters (`foundation.training.few_parameters.lora`). The modules come from `peft`
(`PromptEmbedding`, `PromptEncoder`), so that initialization and network are what its users know; the trained model computes what peft's
`PeftModelForSequenceClassification` computes. In particular a head that reads the first position reads the first virtual token;
`place: behind_first` leaves [CLS] there.

Afterwards p are rows of the embedding matrix, and the tokenizer puts their ids before every text
(`foundation.models.inputs.virtual_tokens`): the checkpoint is a stock one. The network of P-tuning is dropped, as in the paper.

Left out: keys and values in every layer, which are no tokens (`foundation.training.few_parameters.prefix_tuning`); language models,
whose rows are blocks without special tokens; several processes.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from foundation.core.config import Config
from foundation.core.errors import InputError
from foundation.models.own_shape import embedding_rank_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from foundation.stage.context import Context

LEAST_TEXT = 8
"""Tokens of a row, special ones included, that virtual tokens have to leave."""


class PromptTuning(Config):
    """Virtual tokens, trained instead of the weights."""

    tokens: Annotated[int, Field(ge=1, le=1024)] = 16
    """Number of virtual tokens; they count towards `data.max_length`."""
    init: Literal["vocabulary", "random"] = "vocabulary"
    """How their embeddings start, without an encoder: as embeddings of randomly chosen tokens, or as standard normal numbers."""
    place: Literal["front", "behind_first"] = "front"
    """front: before everything, as in peft, so that a head of the first position reads the first virtual token. behind_first: behind the
    first special token, such as [CLS], which that head then reads as before."""
    encoder: Literal["mlp", "lstm"] | None = None
    """P-tuning: a network that makes the embeddings, and is dropped after training. Absent: prompt tuning, which learns them themselves."""


def with_prompt(config: PreTrainedConfig, settings: PromptTuning | None) -> PreTrainedConfig:
    """Returns the Transformers config of a model with virtual tokens, which are rows of its embedding matrix; the same without them."""
    if settings is None:
        return config
    changed = copy.deepcopy(config)
    changed.vocab_size += settings.tokens
    return changed


def check_prompt(settings: PromptTuning, config: PreTrainedConfig, context: Context, key: str) -> None:
    """Checks, before the first stage, that a prompt can be learned for a task and a model.

    Args:
        settings: The prompt.
        config: Transformers config of the model before.
        context: Task, length of a row and processes.
        key: Key path of the settings.

    Raises:
        InputError: It cannot.
    """
    if not context.facts.answers_whole_texts:
        allowed = "virtual tokens are for models that answer a text with classes or a value"
        raise InputError(key, f"given for {context.task}", allowed, "leave it out")
    if rank := embedding_rank_of(config):
        why = f"the embeddings of this model have rank {rank}, and a prompt is as wide as the model"
        raise InputError(key, "given after prune.embedding_rank", why, "learn the prompt before that stage")
    if context.aggregate:
        raise InputError(key, "given with data.windows", "every window would get the prompt", "leave one of them out")
    if settings.tokens > context.max_length - LEAST_TEXT:
        given = f"{settings.tokens} given with data.max_length {context.max_length}"
        raise InputError(f"{key}.tokens", given, f"{LEAST_TEXT} tokens have to be left for a text", "give fewer, or a larger max_length")
    if context.team.size > 1:
        raise InputError(key, f"given with {context.team.size} processes", "a prompt is trained in one", "start one process")


@dataclass(frozen=True)
class Prompted:
    """A model with virtual tokens."""

    source: Path
    """Folder with its tokenizer and the other small files."""
    trained: int
    """Number of trained parameters, the head included."""


@contextmanager
def prompted(model: nn.Module, settings: PromptTuning, source: Path, scratch: Path, seed: int) -> Iterator[Prompted]:
    """Within the block only virtual tokens and the head of the model are trainable; afterwards they are rows of its embedding matrix.

    Args:
        model: A model of Transformers on its device; the same object afterwards, with `vocab_size` larger by the virtual tokens.
        settings: The prompt.
        source: Its checkpoint.
        scratch: Folder in which the files of the tokenizer are written.
        seed: Seed of the initialization.

    Raises:
        InputError: See `foundation.models.inputs.virtual_tokens.with_virtual_tokens`.
    """
    import torch

    from foundation.models.inputs.virtual_tokens import with_virtual_tokens
    from foundation.training.few_parameters.lora import head_of
    from foundation.training.few_parameters.virtual_embedding import VirtualEmbedding, prompt_module
    from foundation.training.state import seeded

    stock: Any = model
    embedding = stock.get_input_embeddings()
    files = scratch / "prompted"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir(parents=True)
    with_virtual_tokens(source, files, embedding.num_embeddings, settings.tokens, behind=settings.place == "behind_first")
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    head = [parameter for parameter in head_of(model) if parameter.requires_grad]
    model.requires_grad_(False)
    with seeded(seed):
        module = prompt_module(settings.tokens, settings.init, settings.encoder, embedding)
    wrapped = VirtualEmbedding(embedding, module.to(embedding.weight.device), settings.tokens)
    stock.set_input_embeddings(wrapped)
    for parameter in (*head, *wrapped.prompt.parameters()):
        parameter.requires_grad_(True)
    yield Prompted(files, sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad))
    with torch.no_grad():
        stock.set_input_embeddings(wrapped.merged())
    stock.config.vocab_size = embedding.num_embeddings + settings.tokens
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(before.get(name, True))
