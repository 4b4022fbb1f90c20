"""Activation checkpointing: the same losses, gradients and buffers, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from foundation.core.errors import InputError
from foundation.core.target import Checkpointing
from foundation.labels.tasks import TASKS
from foundation.models.architecture.shapes import auto_class
from foundation.models.library import quiet, with_class
from foundation.models.size import inputs_of
from foundation.training.recompute import _contexts, check_recomputed, recomputed
from tests.architectures.table import ARCHITECTURES, LENGTH, VOCABULARY, Architecture
from tests.seldom import seldom

pytestmark = pytest.mark.whole

KINDS: tuple[Checkpointing, ...] = ("full", "selective")
USUAL = ("bert", "deberta-v2", "vit", "llama", "mixtral", "t5")
ROUNDED = {"gpt2", "gpt_neo", "gptj", "nystromformer", "t5", "mt5", "umt5", "m2m_100", "switch_transformers", "nllb-moe"}
"""Models whose gradients are added up in another order, in each of their forms."""


def config_of(architecture: Architecture) -> Any:
    keys = dict(architecture.config)
    if TASKS[architecture.task].modality == "text":
        keys |= {"vocab_size": VOCABULARY, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(keys.pop("model_type"), **keys)


def step(model: Any, features: dict[str, Tensor], kind: Checkpointing) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The logits of a step with dropout, the gradients and the buffers after it."""
    model.zero_grad()
    torch.manual_seed(1)
    with recomputed(model, kind, "x"):
        logits = model(**features).logits.float()
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logits.detach(), gradients, {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.first(1)
@pytest.mark.parametrize("name", seldom(ARCHITECTURES, ARCHITECTURES.keys() - set(USUAL)))
def test_a_step_is_the_same_or_refused_before(name: str) -> None:
    architecture = ARCHITECTURES[name]
    config, task = config_of(architecture), architecture.task
    with quiet():
        model = auto_class(task, config).from_config(with_class(copy.deepcopy(config), task)).train()
    rows = {key: value.repeat(2, *[1] * (value.ndim - 1)) for key, value in inputs_of(config, task, LENGTH).items()}
    if "input_ids" in rows:
        rows["input_ids"][:, 1:-1] = torch.randint(4, VOCABULARY, (2, LENGTH - 2))
    start = copy.deepcopy(model.state_dict())
    logits, gradients, buffers = step(model, rows, "none")
    for kind in KINDS:
        try:
            check_recomputed(config, task, LENGTH, kind, "finetune")
        except InputError:
            assert name not in USUAL
            continue
        model.load_state_dict(start)
        mine = step(model, rows, kind)
        assert torch.equal(mine[0], logits)
        assert mine[1].keys() == gradients.keys()
        rounding = (
            max(1e-4, *(1e-6 * float(gradient.abs().max()) for gradient in gradients.values())) if name.partition(" (")[0] in ROUNDED else 0
        )
        for key, gradient in gradients.items():
            torch.testing.assert_close(mine[1][key], gradient, rtol=0, atol=rounding, msg=key)
        assert all(torch.equal(buffer, buffers[key]) for key, buffer in mine[2].items())
        assert "forward" not in {attribute for module in model.modules() for attribute in vars(module)}


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("albert", "full", r"^parallel\.checkpointing: full given for finetune: this albert has 1 blocks for 3 layers"),
        ("resnet", "selective", "this resnet is made of stages of different sizes; a stack of equal blocks is needed$"),
        ("convbert", "selective", "do not do the same twice .*mutated.*: give full, or none$"),
        ("ibert", "full", r"x_min of this ibert changes in every forward pass, so twice in a step: give none$"),
    ],
)
def test_what_cannot_be_computed_again_is_refused(name: str, kind: Checkpointing, reason: str) -> None:
    architecture = ARCHITECTURES[name]
    with pytest.raises(InputError, match=reason):
        check_recomputed(config_of(architecture), architecture.task, LENGTH, kind, "finetune")


def test_the_check_draws_no_numbers() -> None:
    architecture = ARCHITECTURES["bert"]
    before = torch.get_rng_state()
    check_recomputed(config_of(architecture), architecture.task, LENGTH, "full", "finetune")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_running_means_move_once(kind: Checkpointing) -> None:
    once = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
    twice, x_bI = copy.deepcopy(once), torch.randn(8, 3)
    once(x_bI).sum().backward()
    output: Any = checkpoint(twice, x_bI, use_reentrant=False, context_fn=lambda: _contexts(kind, twice))
    output.sum().backward()
    for name, buffer in once.named_buffers():
        assert torch.equal(buffer, twice.get_buffer(name)), name
    assert (twice[1].momentum, int(twice[1].num_batches_tracked)) == (0.1, 1)


def test_blocks_run_twice_and_products_once() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    architecture = ARCHITECTURES["bert"]
    config = config_of(architecture)
    model: Any = auto_class(architecture.task, config).from_config(config).train()
    rows = inputs_of(config, architecture.task, LENGTH)
    flops = {}
    for kind in ("none", "selective", "full"):
        with FlopCounterMode(display=False) as counter:
            step(model, rows, kind)
        flops[kind] = counter.get_total_flops()
    assert flops["none"] == flops["selective"]
    assert flops["full"] == pytest.approx(4 / 3 * flops["none"], rel=0.05)
