"""Embeddings in low rank: the table of tokens becomes a narrow table and a projection (`foundation.models.layers.low_rank_embedding`).

    minimize over A [V, R], B [R, D]:   sum_v f_v ||e_v - a_v B||^2        f_v = 1 + how often token v occurs in the train rows

The best B has the first R right singular vectors of diag(sqrt f) E as its rows, and then a_v = e_v B^T: frequent tokens stay close to what
they were, and tokens that never occur count once. Computed in float64. A row of zeros, such as padding, stays one.

GroupReduce: Chen et al. 2018, https://arxiv.org/abs/1806.06950, section 3.1, weighted low-rank approximation. The 1 that is added keeps
tokens without an occurrence in the sum. Left out: its groups of tokens with a rank and a B of their own, refined by turns, as a model then
looks up as many tables; their tail of rare words is what `granularity: [vocabulary]` removes.

Shape suffixes: V tokens, D width of an embedding, R rank.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.architecture.shapes import on_meta, remade, with_sizes
from foundation.models.architecture.structure import Structure
from foundation.models.layers.low_rank_embedding import PROJECTION, TABLE, LowRankEmbedding, is_table, path_of, width_of_words, words_of
from foundation.models.tied import shared_names, untie_noted
from foundation.training.rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from foundation.standalone.preprocess import Preprocessor, Row

SETTING = "embedding_rank"


@dataclass(frozen=True)
class Factors:
    """A table in low rank."""

    table_VR: Tensor
    """A, float64."""
    projection_DR: Tensor
    """B^T, float64: the weight of a linear layer."""
    error: float
    """sqrt(sum f ||e - a B||^2 / sum f ||e||^2): 0 for an exact one, 1 for a table of zeros."""


def factors(table_VD: Tensor, weights_V: Tensor, rank: int) -> Factors:
    """Returns the best approximation of a table in a lower rank.

    Args:
        table_VD: E, of any float dtype.
        weights_V: f, positive.
        rank: R, at most D.
    """
    E_VD, root_V1 = table_VD.detach().double().cpu(), weights_V.double().sqrt()[:, None]
    weighted_VD = root_V1 * E_VD
    # the same right singular vectors, without left ones as large as the table; all D of them, if there are fewer tokens
    upper_DD = torch.linalg.qr(weighted_VD, mode="r").R
    B_RD = torch.linalg.svd(upper_DD, full_matrices=True).Vh[:rank]
    A_VR = E_VD @ B_RD.T
    left, all_of_it = (root_V1 * (E_VD - A_VR @ B_RD)).norm(), weighted_VD.norm()
    return Factors(A_VR, B_RD.T.contiguous(), float(left / all_of_it) if all_of_it else 0.0)


def occurrences(rows: Sequence[Row], prepared: Preprocessor, tokens: int) -> Tensor:
    """Returns how often each token occurs in rows, cut to the length that the model reads, without padding, float64 [V].

    Args:
        rows: Texts, pairs of texts, or blocks of token ids.
        prepared: Prepares them for the model.
        tokens: V.
    """
    ids = torch.from_numpy(Rows.prepare(rows, prepared).tokens["input_ids"]).long()
    return torch.bincount(ids, minlength=tokens).double()


def check_rank(model: nn.Module, rank: int, key: str) -> None:
    """Checks that the table of a model can have a lower rank.

    Args:
        model: The model, whose shared weights are shared; may be on the meta device.
        rank: R.
        key: Key path of the stage, for messages.

    Raises:
        InputError: It has no plain table, something else reads that table too, or the rank is not lower.
    """
    config: Any = model.config
    key, given, kind = f"{key}.{SETTING}", f"{rank} given", config.model_type
    words = words_of(model)
    if words is None or not is_table(words):
        what = "no table of tokens" if words is None or not isinstance(words, nn.Embedding) else f"a {type(words).__name__}"
        raise InputError(key, given, f"this {kind} has {what}; a plain table of tokens is needed", "leave it out")
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(key, given, f"the two sides of this {kind} look up tokens; a model with one stack is needed", "leave it out")
    name = path_of(model, words)
    others = [other for group in shared_names(model) if f"{name}.weight" in group for other in sorted(group - {f"{name}.weight"})]
    if others:
        raise InputError(key, given, f"{others[0]} of this {kind} is tied to the table of tokens, and would keep it whole", "leave it out")
    width = width_of_words(words)
    if rank >= width:
        raise InputError(key, given, f"the embeddings of this {kind} have rank {width}; a lower one is needed", f"give 1 to {width - 1}")


def config_in_low_rank(config: PreTrainedConfig, rank: int, key: str) -> PreTrainedConfig:
    """Returns the config of a model after its table has got a lower rank; reads no weights.

    Raises:
        InputError: See `check_rank`; or the model does not run like that.
    """
    model: Any = on_meta(config)
    model.tie_weights()  # which is left out where weights are not initialized
    untie_noted(model)
    check_rank(model, rank, key)
    changed = _with_rank(model, config, Structure.of(model, key), rank, key)
    try:
        Structure.of(on_meta(changed), key)  # runs the model
    except InputError as error:
        why = f"a {config.model_type} with embeddings in low rank does not run: something reads its table in another way"
        raise InputError(f"{key}.{SETTING}", f"{rank} given", why, "leave it out") from error
    return changed


def in_low_rank(model: nn.Module, counts_V: Tensor, rank: int, key: str) -> tuple[nn.Module, dict[str, object]]:
    """Returns the model with embeddings in low rank, in evaluation mode on the CPU; the model is not changed.

    Args:
        model: A Transformers model from `foundation.models.checkpoint.load`.
        counts_V: How often each token occurs, float64.
        rank: R.
        key: Key path of the stage, for messages.

    Returns:
        The model, and the figures for the manifest: `rank`, `relative_error` (`Factors.error`), `parameters` of the embeddings `before` and
        `after`.

    Raises:
        InputError: See `check_rank`.
    """
    check_rank(model, rank, key)
    words: Any = words_of(model)
    name = path_of(model, words)
    small = remade(model, _with_rank(model, model.config, Structure.of(model, key), rank, key))
    found = factors(words.whole() if isinstance(words, LowRankEmbedding) else words.weight, counts_V + 1, rank)
    weights = {other: value for other, value in model.state_dict().items() if not other.startswith(f"{name}.")}
    weights |= {f"{name}.{TABLE}.weight": found.table_VR, f"{name}.{PROJECTION}.weight": found.projection_DR}
    small.load_state_dict(weights)
    before, after = (sum(weight.numel() for weight in module.parameters()) for module in (words, small.get_submodule(name)))
    return small.eval(), {"rank": rank, "relative_error": found.error, "parameters": {"before": before, "after": after}}


def _with_rank(model: Any, config: PreTrainedConfig, structure: Structure, rank: int, key: str) -> PreTrainedConfig:
    changed = with_sizes(copy.deepcopy(config), replace(structure.sizes, embedding_rank=rank), key)
    if getattr(model, "get_output_embeddings", lambda: None)() is not None:
        changed.tie_word_embeddings = False  # its head has weights of its own, and the table that it could be tied to is gone
    return changed
