"""The gate for engines that quantize tokens by themselves: dynamic int8 in OpenVINO, int8 activations of a decoder in ONNX Runtime.

OpenVINO does it in groups that are smaller than the token of torch.

Such an engine does not show its codes, and they differ from torch's. On a large model the two differ in many predictions, since both
round, each in its own way. The gate therefore requires that the engine is no further from the exact answer than torch:

    d(engine, float) <= d(torch, float)

where float is the model with its grid weights and float activations, and d the median difference, with a tenth to spare (`NEAR`), and the
number of differing predictions, beyond what chance explains: of the predictions on which only one of the two agrees with float, the
engine fails if too few are its own (sign test, one-sided, `ALPHA`). Two that round equally well win such predictions equally often.

There are few answers, and one different token ends the agreement of a whole answer. There only this test decides.

Such an engine also rounds the input of a head with int8 rows, which torch multiplies in float. So that both round the same tensors, torch
runs with this rounding too (`rounding_head`).

The rounding of ONNX Runtime is known: a block of as many inputs as share a weight scale gets the scale max |x| / 127 and codes rint(x / s),
as its users found too (microsoft/onnxruntime issue 29849). Torch runs with exactly this rounding (`rounding_blocks`), and the engine is
compared with its answers like other engines with torch; if the model amplifies the order of sums, it only has to be no further from float.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from math import comb
from typing import Any

from torch import Tensor, nn

from foundation.core.arrays import Array
from foundation.labels.form import Labels
from foundation.labels.tasks import TASKS, Task
from foundation.measure.agreement import compare_predictions
from foundation.models.folder import Checkpoint
from foundation.schemes.checkpoint import load_quantization
from foundation.schemes.int4_by_int8 import in_blocks
from foundation.schemes.int8 import token_scale
from foundation.schemes.tables import load_tables

ALPHA = 0.01
"""Share of correct engines that the sign test refuses."""
NEAR = 1.1
"""Largest median difference of an engine, as a multiple of torch's."""


@contextmanager
def rounding_head(model: nn.Module, checkpoint: Checkpoint) -> Iterator[None]:
    """Rounds the inputs of a language model's head to int8 while it is open, with a scale for each token, if its rows are int8.

    Args:
        model: The model of a checkpoint.
        checkpoint: The checkpoint; nothing is rounded where its tables are float.
    """
    known: Any = model
    if not load_tables(checkpoint.folder):
        yield
        return

    def rounded(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_bLD, *rest = inputs
        scale_bL1 = token_scale(hidden_bLD)
        return ((hidden_bLD / scale_bL1).round() * scale_bL1, *rest)

    handle = known.get_output_embeddings().register_forward_pre_hook(rounded)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def rounding_blocks(model: nn.Module, checkpoint: Checkpoint) -> Iterator[None]:
    """Rounds the inputs of all layers with integer weights to int8 while it is open, as MatMulNBits of ONNX Runtime does.

    Args:
        model: The float model of a checkpoint, its weights on their grids (`foundation.models.checkpoint.load_float`).
        checkpoint: The checkpoint.
    """
    from export.generation.fused_graph import block_of, table_block

    known: Any = model
    modules = dict(model.named_modules())
    rounded = [
        (modules[name], block_of(scales), getattr(scales, "input_smooth", None))
        for name, scales in load_quantization(checkpoint.folder)[0].items()
    ]
    head = known.get_output_embeddings()
    if load_tables(checkpoint.folder):
        rounded.append((head, table_block(head.in_features), None))
    with ExitStack() as stack:
        for module, block, smooth_I in rounded:
            stack.callback(module.register_forward_pre_hook(_rounding(block, smooth_I)).remove)
        yield


def _rounding(block: int, smooth_I: Tensor | None) -> Callable[[nn.Module, tuple[Tensor, ...]], tuple[Tensor, ...]]:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given, *rest = inputs
        if smooth_I is None:
            return (in_blocks(given, block), *rest)
        return (in_blocks(given / smooth_I, block) * smooth_I, *rest)

    return hook


@dataclass(frozen=True)
class Rounding:
    """The token quantization of an engine."""

    rounds: Callable[[nn.Module, Checkpoint], AbstractContextManager[None]]
    """(model, checkpoint): a context in which the model rounds."""
    exact: bool
    """Whether the engine rounds exactly like this. It is then compared with the float model with this rounding; otherwise torch's integer
    model lacks this rounding, and the engine may be as far from float as torch."""


HEAD = Rounding(rounding_head, exact=False)
BLOCKS = Rounding(rounding_blocks, exact=True)


def fewer_than_chance(floating: Array, torch: Array, engine: Array) -> str | None:
    """Returns in one line why an engine gives fewer of the answers of float activations than torch does; None if chance explains it.

    Args:
        floating: Answers with grid weights and float activations, int32 [n, T].
        torch: Answers of torch's integers.
        engine: Answers of the engine.
    """
    own, found = ((answers == floating).all(axis=1) for answers in (torch, engine))
    lost, won = int((own & ~found).sum()), int((found & ~own).sum())
    if tail(lost, lost + won) >= ALPHA:
        return None
    return (
        f"{int(found.sum())} of {len(floating)} answers are as with float activations, {int(own.sum())} as in torch; {lost} are only "
        f"torch's, {won} only the engine's"
    )


def tail(heads: int, tosses: int) -> float:
    """Returns the probability of at least so many heads of a fair coin."""
    return float(sum(comb(tosses, count) for count in range(heads, tosses + 1)) / 2**tosses)


def further_than_torch(task: Task, floating: Array, torch: Array, engine: Array, labels: Labels) -> str | None:
    """Returns in one line why an engine is further from the model with float activations than torch's integers are; None if it is not.

    Args:
        task: The task.
        floating: Answers with grid weights and float activations, float32 [n, C] or [n, T, 2].
        torch: Answers of torch's integers.
        engine: Answers of the engine.
        labels: Labels of the rows.
    """
    own, found = (compare_predictions(task, floating, answers, labels) for answers in (torch, engine))
    lost, won = only_one_as_in_float(task, floating, torch, engine)
    if found["passed"] or (tail(lost, lost + won) >= ALPHA and found["median_abs"] <= NEAR * own["median_abs"]):
        return None
    return (
        f"{found['disagreements']} of {found['n']} predictions differ from those with float activations, of torch {own['disagreements']}; "
        f"median |d{found['differs']}| {found['median_abs']:.4f} and {own['median_abs']:.4f}"
    )


def only_one_as_in_float(task: Task, floating: Array, torch: Array, engine: Array) -> tuple[int, int]:
    """Returns how many predictions are as with float activations in torch alone, and in the engine alone; arguments as above."""
    other_own, other = (TASKS[task].answer.differences(floating, answers)[0] for answers in (torch, engine))
    return int((other & ~other_own).sum()), int((other_own & ~other).sum())
