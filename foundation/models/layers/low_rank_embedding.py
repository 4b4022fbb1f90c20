"""Embeddings in low rank: a narrow table and a projection to the width of the model, as in ALBERT and ELECTRA.

    E [V, D] ~ A B        A [V, R], a row for each token; B [R, D], the same for all of them;  e_v = a_v B

V D weights become R (V + D). The module stands in the place of the table of tokens, so that a model calls it like the table it had. The row
of padding belongs to A: training gives it no gradient, as in the table before, and a row of zeros stays one. B is trained, so that a row
of padding that is not zero moves with it.

ALBERT: Lan et al. 2020, https://arxiv.org/abs/1909.11942, section 3.1. `prune.embeddings.low_rank` computes A and B.

Not supported: a table that something else reads too (a tied head, the other side of an encoder-decoder), tables with a forward of their
own, such as scaled ones.

Shape suffixes: V tokens, D width of an embedding, R rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError

TABLE, PROJECTION = "table", "projection"
"""Names of the children."""


class LowRankEmbedding(nn.Module):
    """A narrow table, and its projection.

    Args:
        tokens: V.
        rank: R.
        width: D.
        padding_idx: Row that gets no gradient; None: every row gets one.
        like: Tensor with the device and the number format of the model; None: torch's defaults.
    """

    def __init__(self, tokens: int, rank: int, width: int, padding_idx: int | None = None, like: Tensor | None = None) -> None:
        super().__init__()
        given: dict[str, Any] = {} if like is None else {"device": like.device, "dtype": like.dtype}
        self.table = nn.Embedding(tokens, rank, padding_idx=padding_idx, **given)
        self.projection = nn.Linear(rank, width, bias=False, **given)

    @property
    def num_embeddings(self) -> int:
        """V."""
        return self.table.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """D."""
        return self.projection.out_features

    @property
    def padding_idx(self) -> int | None:
        """Row that gets no gradient."""
        return self.table.padding_idx

    @property
    def weight(self) -> Tensor:
        """A: the parameter with a row for each token, which models that draw weights of their own look for here (ModernBERT)."""
        return self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the embeddings of ids, float [..., D]."""
        embedded: Tensor = self.projection(self.table(ids))
        return embedded

    def whole(self) -> Tensor:
        """Returns A B, float64 [V, D]."""
        return self.table.weight.detach().double() @ self.projection.weight.detach().double().T


def words_of(model: nn.Module) -> nn.Module | None:
    """Returns the module that embeds tokens; None for a model that has none, or several.

    What a model for images gives as its input embeddings is no table, and is returned all the same.
    """
    known: Any = model
    try:
        found: nn.Module | None = known.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # CANINE has several tables, and models of sounds none
        return None
    return found


def path_of(model: nn.Module, words: nn.Module) -> str:
    """Returns the path of a module of a model."""
    path: str = next(name for name, module in model.named_modules() if module is words)
    return path


def width_of_words(words: nn.Module) -> int:
    """Returns D of a table, or R of one in low rank: a lower rank has to be below it."""
    return words.table.embedding_dim if isinstance(words, LowRankEmbedding) else int(getattr(words, "embedding_dim", 0))


def low_rank_tables(model: nn.Module) -> dict[str, LowRankEmbedding]:
    """Returns the embeddings in low rank of a model by module path: one, or none."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LowRankEmbedding)}


def put_low_rank(model: nn.Module, rank: int, key: str) -> LowRankEmbedding:
    """Puts embeddings in low rank, with weights that are drawn, in the place of the table of tokens of a model, in place.

    Args:
        model: The model.
        rank: R.
        key: Start of the error message.

    Returns:
        What was put there.

    Raises:
        InputError: The model has no such table.
    """
    words: Any = words_of(model)
    if not is_table(words):
        raise InputError(key, f"embeddings in low rank, which a {type(model).__name__} cannot have", remedy="write the checkpoint again")
    old: Tensor = words.weight
    made = LowRankEmbedding(words.num_embeddings, rank, words.embedding_dim, words.padding_idx, old)
    if not old.is_meta:  # as small as what the model draws
        with torch.no_grad():
            made.table.weight.mul_(getattr(getattr(model, "config", None), "initializer_range", 0.02))
    model.set_submodule(path_of(model, words), made)
    return made


def is_table(words: nn.Module | None) -> bool:
    """Whether a module is a table whose rows can be written in low rank: a plain one, or one in low rank already."""
    return type(words) is nn.Embedding or isinstance(words, LowRankEmbedding)
