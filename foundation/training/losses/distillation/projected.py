"""Projected vectors: a student whose vectors are narrower learns its teacher's vectors through a projection.

    pca      loss_b = |u(v_s) - u(B v_t)|^2              B: the D_s directions in which the teacher's vectors of the training rows differ
    most learned  loss_b = |u(P v_s) - u(v_t)|^2              P [D_t, D_s] is trained with the student and then left out
    (https://arxiv.org/abs/1412.6550)

with u(v) = v / |v|, so that the loss is 2 - 2 cos. With `pca` the angles between the student's vectors become the angles of the teacher's
in these directions; with `learned` nothing says what the student's angles are but that a linear layer finds the teacher's in them. Neither
keeps an index of the teacher's vectors of use.

The directions are the right singular vectors of the centred vectors, the largest first, as sentence-transformers reduces dimensions; each
with the sign that makes its largest entry positive. Cosines of B v_t differ from cosines of v_t: what the directions left out held is lost
to any student of this width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from foundation.core.errors import InputError
from foundation.training.losses.distillation.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.training.distillation.capture import Wanted
    from foundation.training.losses.distillation.loss import LossInputs, Setting


class Projected(Loss):
    """The teacher's vectors through a projection, for students with narrower ones."""

    ANSWERS_ONLY: ClassVar[bool] = True
    COMPARES_ANSWERS: ClassVar[bool] = True
    TAKES_VECTORS: ClassVar[bool] = True
    VECTORS_ALONE: ClassVar[bool] = True
    ONE_ANSWER: ClassVar[bool] = True

    name: Literal["projected"] = "projected"
    """The teacher's vectors through a projection, for students with narrower vectors."""
    projection: Literal["pca", "learned"] = "pca"
    """pca: the student learns the teacher's vectors in the directions in which those differ most; learned: a layer that is trained along
    widens the student's vectors to the teacher's."""

    def wants(self, setting: Setting) -> tuple[Wanted, Wanted]:
        """The vectors of both models.

        Raises:
            InputError: The student's vectors are no narrower than the teacher's.
        """
        from foundation.training.distillation.capture import Wanted

        ours, theirs = setting.student.classes, setting.teacher.classes
        if ours >= theirs:
            raise InputError(
                setting.key,
                "projected given",
                f"the vectors of the student have {ours} numbers, the teacher's {theirs}",
                "give soft_target",
            )
        return Wanted(logits=True), Wanted(logits=True)

    def build(self, setting: Setting) -> nn.Module:
        """Returns the directions, or the layer that is trained."""
        from torch import nn

        from foundation.training.losses.distillation.directions import Directions

        ours, theirs = setting.student.classes, setting.teacher.classes
        return Directions(ours, theirs) if self.projection == "pca" else nn.Linear(ours, theirs, bias=False)

    def parts(self, inputs: LossInputs, trained: nn.Module | None) -> Mapping[str, Tensor]:
        """Returns `projected`."""
        from foundation.training.losses.distillation.directions import Directions, teacher_vectors
        from foundation.training.precision import in_float32

        student, teacher = inputs.student.logits, inputs.teacher.logits
        if isinstance(trained, Directions):
            if not trained.fitted:
                trained.fit(teacher_vectors(inputs.pair).to(student.device))
            return {"projected": distance(student, trained(teacher))}
        assert trained is not None, "build returned a layer"
        with in_float32(student):
            widened = trained(student.float())
        return {"projected": distance(widened, teacher)}


def distance(one_bD: Tensor, other_bD: Tensor) -> Tensor:
    """Returns 2 - 2 cos of each pair of vectors, float32 `[b]`; of a vector of zeros it is 1."""
    from torch.nn import functional

    from foundation.training.precision import in_float32

    with in_float32(one_bD):
        ours, theirs = (functional.normalize(vectors.float(), dim=1) for vectors in (one_bD, other_bD))
        return (ours - theirs).square().sum(dim=1)
