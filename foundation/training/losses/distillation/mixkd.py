"""MixKD: the student learns the teacher's logits for mixtures (mixup) of two rows.

https://arxiv.org/abs/2011.00593, section 3:

    x' = l e(x_i) + (1 - l) e(x_j)        l ~ Beta(a, a); e: each model's own word embeddings, padded to equal length
    y' = l y_i + (1 - l) y_j
    mixed_labels_b  = CE(z_s(x'), y')     regression: (z_s(x') - y')^2
    mixed_answers_b = soft targets of z_t(x') for z_s(x')

x' has a token wherever either row has one; its token type comes from x_i if x_i has a token there, else from x_j. The patch embedding of
an image is linear, so mixing pixels equals mixing embeddings. The partner j and l are drawn from (seed, step, row), independent of how the
batch is split. j is drawn among rows of similar length: batches hold similar lengths anyway, so this loses little and wastes no time on
padding. For copies with masked tokens the masked tokens are mixed, and a row is never mixed with its own copy. mixed_labels is 0
where either row has no label. Not supported: back-translation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from foundation.core.errors import InputError
from foundation.training.distillation.masking import Masking
from foundation.training.losses.distillation.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.training.distillation.capture import Capture, Wanted
    from foundation.training.distillation.teacher import Pair
    from foundation.training.losses.distillation.loss import LossInputs, Setting
    from foundation.training.rows import ByLength, Rows

NEIGHBOURS = 256
"""How far away in the rows sorted by length a partner may be, to either side."""
PROBED_ROWS = 4
TOLERANCE = 1e-3


class MixKD(Loss):
    """Labels and teacher logits of mixtures of two rows."""

    COMPARES_ANSWERS: ClassVar[bool] = True
    ONE_ANSWER: ClassVar[bool] = True
    OWN_INPUTS: ClassVar[bool] = True

    name: Literal["mixkd"] = "mixkd"
    """Labels and teacher logits of mixtures of two rows (mixup)."""
    alpha: Annotated[float, Field(gt=0, le=100)] = 0.4
    """Both parameters of the Beta distribution of the mixing ratio: 1 is uniform, below 1 one of the two rows dominates."""
    labels: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the mixed labels."""
    answers: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the soft targets for the mixtures; the teacher runs on every batch."""

    @model_validator(mode="after")
    def _learns(self) -> MixKD:
        if not self.labels and not self.answers:
            raise ValueError("labels and answers: 0 given for both; give a value above 0 for one, or remove mixkd")
        return self

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """Nothing: the loss runs both models on its own inputs.

        Raises:
            InputError: The rows are candidates of queries.
        """
        from foundation.training.distillation.capture import Wanted

        if setting.facts.reranks:
            raise InputError(
                setting.key, f"{self.name} given", "a mixture of two candidates belongs to no query", "give soft_target or margin_mse"
            )
        return Wanted(), Wanted()

    def prepare(self, pair: Pair) -> None:
        """Checks that both models compute the same logits from embeddings as from token ids.

        Raises:
            InputError: One does not, such as a decoder that finds the end of a text by its padding token.
        """
        import torch

        from foundation.models.forward import device_of, on_device
        from foundation.training.distillation.capture import Wanted

        indices = np.arange(min(PROBED_ROWS, len(pair.labels)))
        for capture, rows in ((pair.student, pair.rows), (pair.teacher.capture, pair.teacher.rows)):
            features = on_device(rows.batch(indices), device_of(capture.model))
            ones = torch.ones(len(indices), device=device_of(capture.model))
            with torch.no_grad():
                given = capture(features, Wanted(logits=True)).logits
                mixed = capture(mixture(capture.model, features, features, ones), Wanted(logits=True)).logits
            if float((given - mixed).abs().max()) > TOLERANCE * (1 + float(given.abs().max())):
                kind = capture.model.config.model_type  # type: ignore[union-attr]
                raise InputError(
                    capture.key, "mixkd given", f"this {kind} gives other logits for embeddings than for tokens", "choose another loss"
                )

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `mixed_labels` and `mixed_answers`, omitting terms of weight 0."""
        import torch

        from foundation.training.losses.table import losses_of

        pair, batch = inputs.pair, inputs.batch
        device, losses = batch.labels.device, losses_of(inputs.setting.task)
        originals = None if pair.masking is None else pair.masking.originals
        partners, shares = draw(batch.indices, batch.step, pair.rows.by_length, pair.seed, self.alpha, originals)
        share_b = torch.from_numpy(shares).to(device)
        both = np.concatenate([batch.indices, partners])
        logits_bC = self._mixed_logits(pair.student, masked(pair.rows, both, batch.step, pair.masking), share_b)
        parts = {}
        if self.labels:
            other_labels = torch.from_numpy(pair.labels.array[partners]).to(device)
            mixed_b = losses.mixed(logits_bC, batch.labels, other_labels, share_b)
            labelled_b = pair.labelled(batch.indices, partners)
            parts["mixed_labels"] = self.labels * (mixed_b if labelled_b is None else torch.where(labelled_b.to(device), mixed_b, 0.0))
        if self.answers:
            with torch.no_grad():
                features = masked(pair.teacher.rows, both, batch.step, pair.masking)
                teacher_bC = self._mixed_logits(pair.teacher.capture, features, share_b)
            parts["mixed_answers"] = self.answers * losses.taught(logits_bC, teacher_bC, batch.labels, inputs.temperature)
        return parts

    def _mixed_logits(self, capture: Capture, features: Mapping[str, Tensor], share_b: Tensor) -> Tensor:
        """Returns the logits for mixtures of the first half of the rows with the second half."""
        from foundation.models.forward import device_of, on_device
        from foundation.training.distillation.capture import Wanted

        half, device = len(share_b), device_of(capture.model)
        first, second = (on_device({name: value[part] for name, value in features.items()}, device) for part in _split_batch(half))
        return capture(mixture(capture.model, first, second, share_b), Wanted(logits=True)).logits


def masked(rows: Rows, indices: NDArray[np.int64], step: int, masking: Masking | None) -> dict[str, Tensor]:
    """Returns the features of some rows, with tokens masked in masked copies."""
    features = rows.batch(indices)
    return features if masking is None else masking(features, indices, step)


def mixture(model: nn.Module, first: Mapping[str, Tensor], second: Mapping[str, Tensor], share_b: Tensor) -> dict[str, Tensor]:
    """Returns the inputs of a model for mixtures of rows.

    Args:
        model: A Transformers model, whose word embeddings are used.
        first: Features of rows x_i, int64 `[b, L]` each, or `pixel_values` float32 `[b, channels, H, W]`.
        second: Features of rows x_j, of the same shapes.
        share_b: l of each row, float32 `[b]`.
    """
    import torch

    numbers = [name for name in first if first[name].is_floating_point()]
    if numbers:  # pixels, samples or energies
        share = share_b.reshape(-1, *[1] * (first[numbers[0]].dim() - 1))
        mixed = {name: share * first[name] + (1 - share) * second[name] for name in numbers}
        return mixed | {name: first[name] | second[name] for name in first if name not in numbers}
    embed, share = model.get_input_embeddings(), share_b[:, None, None]  # type: ignore[operator]
    mask = first["attention_mask"].bool()
    mixed = {"inputs_embeds": share * embed(first["input_ids"]) + (1 - share) * embed(second["input_ids"])}
    mixed["attention_mask"] = first["attention_mask"] | second["attention_mask"]
    if "token_type_ids" in first:
        mixed["token_type_ids"] = torch.where(mask, first["token_type_ids"], second["token_type_ids"])
    return mixed


def draw(
    indices: NDArray[np.int64], step: int, rows: ByLength, seed: int, alpha: float, originals: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Returns the partner and l of each row, int64 and float32 `[b]`; a row is its own partner only if there is no other row nearby.

    Args:
        indices: Rows of the batch.
        step: Number of the step.
        rows: The training rows sorted by length.
        seed: Seed of the training.
        alpha: Both parameters of the Beta distribution.
        originals: Number of rows before their masked copies, which follow in the same order; None without copies.
    """
    partners, shares = np.empty_like(indices), np.empty(len(indices), np.float32)
    number = len(rows.order) if originals is None else originals
    for position, index in enumerate(indices):
        random, rank = np.random.default_rng([seed, step, int(index)]), rows.rank[index]
        low, high = max(0, rank - NEIGHBOURS), min(len(rows.order), rank + NEIGHBOURS + 1)
        near = rows.order[low:high]
        others = near[near % number != index % number]
        partners[position] = others[random.integers(len(others))] if len(others) else index
        shares[position] = random.beta(alpha, alpha)
    return partners, shares


def _split_batch(half: int) -> tuple[slice, slice]:
    return slice(0, half), slice(half, None)
