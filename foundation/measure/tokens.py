"""Compares the tokens of two language models that answer the same prompts; after the first difference their texts differ.

    decisions      tokens that both chose after the same tokens: for each prompt all up to the first that differs, and that one
    disagreements  prompts with such a token: after it the models read different texts, and nothing more is compared
    equal_share    share of all positions with the same token; also counts those that are equal after a difference by chance

Answers that end are filled up with `ENDED`, in files too; where both have ended there is no position.

Disagreements among decisions are judged like other predictions of two engines (`foundation.standalone.tolerance`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundation.standalone.tolerance import disagreements_allowed

ENDED = -1
"""Fills the positions after the end of an answer."""
Tokens = NDArray[np.int32]


def ended(answers: Tokens) -> bool:
    """Returns whether any of these answers, int32 [n, T], has ended before its last token: end tokens counted when they were given."""
    return bool((answers == ENDED).any())


def compare_tokens(reference: Tokens, answers: Tokens) -> dict[str, Any]:
    """Compares answers of equal length.

    Args:
        reference: Token ids of one model, int32 [n, T]; `ENDED` after the end of an answer.
        answers: The tokens of the other, int32 [n, T].

    Returns:
        `prompts` n, `tokens` T, `equal_share`, `identical` (answers that are equal throughout), `first_other` (position of the first token
        that differs, 0 to T - 1: the median over the answers that differ; None where none does), `decisions`, `disagreements`, `limit`,
        `passed`.
    """
    if reference.shape != answers.shape or reference.ndim != 2:
        raise ValueError(f"answers of shapes {list(reference.shape)} and {list(answers.shape)}; two of [n, T] are compared")
    prompts, tokens = reference.shape
    other_nT = reference != answers
    differs_n = other_nT.any(axis=1)
    first_n = np.where(differs_n, other_nT.argmax(axis=1), tokens)
    written_nT = (reference != ENDED) | (answers != ENDED)
    written_n = written_nT.sum(axis=1)
    decisions, disagreements = int(np.minimum(first_n + 1, written_n).sum()), int(differs_n.sum())
    limit = disagreements_allowed(decisions)
    return {
        "prompts": prompts,
        "tokens": tokens,
        "equal_share": round(float(1 - other_nT.sum() / written_n.sum()), 6),
        "identical": prompts - disagreements,
        "first_other": float(np.median(first_n[differs_n])) if disagreements else None,
        "decisions": decisions,
        "disagreements": disagreements,
        "limit": limit,
        "passed": disagreements <= limit,
    }


def token_shortfall(compared: Mapping[str, object], other: str) -> str | None:
    """Returns in one line why two models do not agree, None if they do.

    Args:
        compared: Result of `compare_tokens`.
        other: Name of the reference.
    """
    if compared["passed"]:
        return None
    return (
        f"{compared['disagreements']} of {compared['decisions']} tokens that follow equal ones differ from {other} "
        f"(at most {compared['limit']}), in {compared['disagreements']} of {compared['prompts']} answers"
    )


def filled(answers: Sequence[Sequence[int] | Tokens], tokens: int) -> Tokens:
    """Returns answers as one array, int32 [n, T]; `ENDED` after the shorter ones."""
    whole = np.full((len(answers), tokens), ENDED, np.int32)
    for row, answer in zip(whole, answers, strict=True):
        row[: len(answer)] = answer
    return whole


def save_answers(path: Path, prompts: Sequence[Tokens], tokens: Tokens, mixed: tuple[Sequence[Tokens], Tokens] | None = None) -> None:
    """Writes `prompts` int32 [n, P] and `tokens` int32 [n, T] to a safetensors file; `ENDED` fills up the shorter ones.

    Args:
        path: The file.
        prompts: Prompts, int32 [P] each.
        tokens: Answers, int32 [n, T].
        mixed: The same for prompts of several lengths, which a server answers too; written as `mixed_prompts` and `mixed_tokens`.
    """
    from safetensors.numpy import save_file

    found = {"prompts": filled(prompts, max(len(row) for row in prompts)), "tokens": np.ascontiguousarray(tokens)}
    if mixed is not None:
        rows, answers = mixed
        found |= {"mixed_prompts": filled(rows, max(len(row) for row in rows)), "mixed_tokens": np.ascontiguousarray(answers)}
    save_file(found, path)


def load_answers(path: Path) -> tuple[list[Tokens], Tokens]:
    """Reads the file of `save_answers`: prompts int32 [P] each, and tokens int32 [n, T]."""
    from safetensors.numpy import load_file

    found = load_file(path)
    return _rows(found["prompts"]), found["tokens"]


def load_mixed_answers(path: Path) -> tuple[list[Tokens], Tokens] | None:
    """Reads the prompts of several lengths and their answers; None where there are none."""
    from safetensors.numpy import load_file

    found = load_file(path)
    return (_rows(found["mixed_prompts"]), found["mixed_tokens"]) if "mixed_prompts" in found else None


def _rows(filled_up: Tokens) -> list[Tokens]:
    return [row[row != ENDED] for row in filled_up]
