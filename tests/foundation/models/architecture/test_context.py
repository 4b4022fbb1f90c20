"""Processes that share the tokens of rows have the logits and, added up, the gradients of one; what reads several at once is refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.core.target import Checkpointing
from foundation.models.architecture.context import check_context, share_context
from foundation.models.architecture.shapes import auto_class
from foundation.models.layers.context_attention import attention
from foundation.models.layers.token_shares import Group
from foundation.models.library import with_class
from foundation.training.recompute import recomputed
from tests.foundation.models.architecture.test_sequence import SIZES, rows, whole_model
from tests.foundation.models.architecture.test_split import config_of
from tests.threads import together


class Neighbours(nn.Module):
    """Adds the token before, as a convolution does."""

    def forward(self, x_bTD: Tensor) -> Tensor:
        return x_bTD + nn.functional.pad(x_bTD, (0, 0, 1, 0))[:, :-1]


class ByPlace(nn.Module):
    """Counts tokens itself, instead of being told their positions."""

    def forward(self, x_bTD: Tensor) -> Tensor:
        places_T, channels_D = (torch.arange(size, dtype=x_bTD.dtype) for size in x_bTD.shape[1:])
        return x_bTD + places_T[:, None] * channels_D.cos()


class Axes(nn.Module):
    """A norm over the rows and tokens of a batch."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x_bTD: Tensor) -> Tensor:
        return self.norm(x_bTD.mT).mT


KINDS = ("bert", "distilbert", "vit", "gpt2", "gpt_neox", "llama", "modernbert", "qwen2", "cohere", "glm4", "opt")


def compared(kind: str, processes: int, lengths: tuple[int, ...], checkpointing: Checkpointing = "none") -> None:
    """Compares the logits of several passes, and the gradients of one backward pass through all of them."""
    model, task = whole_model(kind)
    batches = [rows(model, task, length) for length in lengths]
    expected = [model(**features).logits for features in batches]
    torch.manual_seed(1)
    upstream = [torch.randn_like(logits) for logits in expected]
    shares = [copy.deepcopy(model) for _ in range(processes)]
    torch.autograd.backward(expected, upstream)

    def run(rank: int) -> list[Tensor]:
        import torch.distributed as dist

        share_context(shares[rank], Group(processes, rank, dist.group.WORLD))
        with recomputed(shares[rank], checkpointing, "model"):
            found = [shares[rank](**features).logits for features in batches]
            torch.autograd.backward(found, [gradient / processes for gradient in upstream])
        return [logits.detach() for logits in found]

    for found in together(processes, run):
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, wanted.detach(), rtol=1e-6, atol=1e-6)
    rounds = kind in ("cohere",)  # norms compute in float32
    for name, parameter in model.named_parameters():
        parts = [share.get_parameter(name).grad for share in shares]
        whole = sum(part for part in parts if part is not None)
        if parameter.grad is not None:
            torch.testing.assert_close(whole, parameter.grad, rtol=1e-3 if rounds else 1e-7, atol=1e-5 if rounds else 1e-8, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_one_process(kind: str) -> None:
    compared(kind, 2, (7,))


@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("length", [1, 5, 8])
def test_four_processes_share_any_number_of_tokens(kind: str, length: int) -> None:
    compared(kind, 4, (length,))


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_each_pass_keeps_its_own_number_of_tokens(checkpointing: Checkpointing) -> None:
    """The second pass is over when the blocks of the first are run again."""
    compared("llama", 2, (7, 4), checkpointing)


def test_a_mask_of_all_tokens_is_cut_to_own_ones() -> None:
    """A mask with four axes is used as it is given."""
    model, _ = whole_model("llama")
    ids = torch.randint(3, 60, (1, 7))
    added = torch.full((1, 1, 7, 7), -1e9, dtype=torch.float64).triu(1)
    added[..., 2, 0] = -1e9
    expected = model(input_ids=ids, attention_mask=added).logits

    def run(rank: int) -> Tensor:
        import torch.distributed as dist

        share_context(shares[rank], Group(3, rank, dist.group.WORLD))
        return shares[rank](input_ids=ids, attention_mask=added).logits.detach()

    shares = [copy.deepcopy(model) for _ in range(3)]
    for found in together(3, run):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-6)


def test_dropout_of_attention_is_drawn_alike_in_both_passes() -> None:
    """The gradient is that of the logits: compared with finite differences while random numbers repeat themselves."""
    torch.manual_seed(0)
    config, task = config_of("bert", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0, classifier_dropout=0.0)
    model = auto_class(task, config).from_config(config).double().train()
    share_context(model, Group(1))
    features, weight = rows(model, task, 6), model.bert.encoder.layer[0].attention.self.value.weight

    def loss() -> Tensor:
        torch.manual_seed(3)
        return model(**features).logits.square().sum()

    torch.autograd.backward(loss())
    direction = torch.randn_like(weight)
    slope, step = float((weight.grad * direction).sum()), 1e-6
    with torch.no_grad():
        weight += step * direction
        above = float(loss())
        weight -= 2 * step * direction
        below = float(loss())
    assert (above - below) / (2 * step) == pytest.approx(slope, rel=1e-5)
    assert slope != 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [2, 3])
def test_a_trial_finds_that_shares_compute_the_same(kind: str, processes: int) -> None:
    config, task = config_of(kind, **SIZES.get(kind, {}))
    check_context(config, task, 16, processes, "stages.finetune")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "gptj",
            "does not run on shares of its tokens (a block attends by code of its own, not by the attention functions of Transformers)",
        ),
        ("gemma2", "does not run on shares of its tokens (`sdpa` attention does not support `softcap`"),
        ("gpt_oss", "does not run on shares of its tokens (a GptOssAttention adds learned numbers to the products of queries and keys)"),
        ("t5", "has two stacks of blocks, one of which reads the tokens of the other"),
        ("beit", "leaves out blocks at random (drop_path_rate: 0.1), each process others"),
    ],
)
def test_what_cannot_be_shared_is_told_in_one_line(kind: str, message: str) -> None:
    from transformers import CONFIG_MAPPING

    if kind == "gptj":
        config, task = with_class(CONFIG_MAPPING[kind](**SIZES[kind]), "text-generation"), "text-generation"
    else:
        config, task = config_of(kind, **SIZES.get(kind, {}))
    with pytest.raises(InputError, match=re.escape(f"stages.finetune: parallel.context: 2 given; this {kind} {message}")) as raised:
        check_context(config, task, 16, 2, "stages.finetune")
    assert str(raised.value).endswith("give context: 1")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("module", "refused"),
    [(Neighbours(), True), (nn.BatchNorm1d(32), True), (nn.LayerNorm(32), False), (nn.Dropout(0.1), False), (ByPlace(), True)],
)
def test_a_trial_finds_what_mixes_tokens_beside_attention(module: nn.Module, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bert.modeling_bert import BertOutput

    original: Any = BertOutput.__init__

    def with_module(self: Any, config: Any) -> None:
        original(self, config)
        self.dropout = Axes(module) if isinstance(module, nn.BatchNorm1d) else module

    config, task = config_of("bert")
    monkeypatch.setattr(BertOutput, "__init__", with_module)
    if not refused:
        check_context(config, task, 16, 2, "finetune")
        return
    with pytest.raises(InputError, match=r"on shares of its tokens \(by .* standard deviations\)"):
        check_context(config, task, 16, 2, "finetune")


def test_attention_outside_of_a_shared_model_is_no_silent_error() -> None:
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="a Identity attends outside of a model"):
        attention(nn.Identity(), query, query, query, None)
