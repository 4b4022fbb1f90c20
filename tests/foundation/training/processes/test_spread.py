"""What one process does with choices of experts, with exchanges that stay in it; and steps in which some of two have nothing to do."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BartConfig

from foundation.core.errors import InputError
from foundation.core.target import Parallel
from foundation.machine.parallel import Team
from foundation.models.architecture.expert_shares import check_experts
from foundation.models.layers import expert_parallel
from foundation.models.layers.expert_parallel import Choices, Spread, StackedExperts, stacked_where_listed
from foundation.training.allowed import check_training
from foundation.training.finetune import Finetune
from foundation.training.train import _Loop
from tests.foundation.training.processes import expert_processes
from tests.problems import raises_problem
from tests.ranks import in_ranks


class Here(Spread):
    """A process that spreads experts among itself."""

    def _gathered(self, counts_E: Tensor) -> Tensor:
        return counts_E[None]

    def _exchange(self, rows: Tensor, sent: Tensor, received: Tensor) -> Tensor:
        assert len(rows) == int(sent.sum()) == int(received.sum())
        return rows.clone()


@pytest.mark.parametrize(("capacity", "training", "idle", "tokens", "counted"), [
    (None, True, False, [0, 1, 2, 3], (4, 0)),
    (1.0, True, False, [1, 2, 3], (4, 1)),  # two choices an expert, those with the largest weights
    (1.0, False, False, [0, 1, 2, 3], (0, 0)),
    (1.0, True, True, [], (0, 0)),
    (1.0, False, True, [0, 1, 2, 3], (0, 0)),
])  # fmt: skip
def test_choices_that_stay(capacity: float | None, training: bool, idle: bool, tokens: list[int], counted: tuple[int, int]) -> None:
    spread = Here(1, 0, None, capacity, idle=idle)
    states = torch.arange(8.0).view(4, 2)
    choices = Choices(torch.arange(4), torch.tensor([0, 0, 0, 1]), torch.tensor([0.1, 0.3, 0.2, 0.4]))
    experts = SimpleNamespace(num_experts=2, training=training)
    said = spread.answers(states, choices, experts, lambda states, numbers: states + 10 * numbers[:, None])
    assert choices.tokens_S.tolist() == tokens
    assert said.tolist() == [[2.0 * token + 10 * (token == 3), 2.0 * token + 1 + 10 * (token == 3)] for token in tokens]
    assert (spread.chosen, spread.dropped) == counted


@pytest.mark.parametrize("counts", [True, False])
def test_rows_that_only_take_part_choose_no_expert(counts: bool) -> None:
    loop: Any = SimpleNamespace(pipeline=None, sharers=None, division=SimpleNamespace(spread=Here(1, 0, None, idle=counts)))
    loop._batch, loop._autocast = (lambda *given: None), (lambda dtype: nullcontext())
    loop.engine = lambda batch: {"loss": torch.ones(2, requires_grad=True)}
    assert _Loop._backward(loop, np.arange(2), counts, 2, torch.float32) == {"loss": 2.0 if counts else 0.0}
    assert loop.division.spread.idle is not counts


def test_the_answers_of_experts_drop_out_as_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_parallel, "_own_weights", lambda module: dict(module.named_parameters(recurse=False)))
    model = expert_processes.model("nllb-moe")
    stock: Any = next(module for module in model.modules() if type(module).__name__ == "NllbMoeExperts")
    stock.moe_token_dropout = 0.5
    states, gates = torch.randn(64, 16), torch.nn.functional.one_hot(torch.arange(64) % 4, 4).float() * 0.7
    with torch.no_grad():
        expected = stock.eval()(states, gates != 0, gates)
        stacked = StackedExperts(stock).eval()
        forward = expert_parallel._forward_of_listed(stacked, Here(1, 0, None))
        torch.testing.assert_close(forward(states, gates != 0, gates), expected)
        stacked.train()
        found = forward(states, gates != 0, gates)
    zeros = found == 0
    assert 0.4 < float(zeros.float().mean()) < 0.6
    torch.testing.assert_close(found[~zeros], 4 * expected[~zeros])  # evaluation halves what training doubles


def test_processes_draw_alike_after_experts_that_drew_for_different_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_parallel, "_own_weights", lambda module: dict(module.named_parameters(recurse=False)))
    stock: Any = next(module for module in expert_processes.model("nllb-moe").modules() if type(module).__name__ == "NllbMoeExperts")
    stock.moe_token_dropout = 0.5
    forward = expert_parallel._forward_of_listed(StackedExperts(stock), Here(1, 0, None))
    states = []
    with torch.random.fork_rng():
        for tokens in (3, 8):
            torch.manual_seed(5)
            forward(torch.ones(tokens, 16), torch.ones(tokens, 4) > 0, torch.ones(tokens, 4))
            states.append(torch.get_rng_state())
        assert torch.equal(states[0], states[1])
        drawn = []
        for rank in (0, 1, 0):
            torch.manual_seed(5)
            for _ in range(2):
                with expert_parallel.drawing_apart(torch.device("cpu"), rank):
                    drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 4  # other numbers in each layer and process
    assert drawn[:2] == drawn[4:]


def test_an_error_leaves_the_block_without_waiting_for_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathers(*given: Any) -> None:
        raise AssertionError("weights were gathered")

    monkeypatch.setattr(StackedExperts, "give_back", gathers)
    with pytest.raises(InputError, match="the loss became NaN"), stacked_where_listed(expert_processes.model("nllb-moe"), spreads=True):
        raise InputError("finetune", "the loss became NaN")


def test_blocks_that_are_left_out_at_random_are_refused() -> None:
    config = expert_processes.model("nllb-moe").config
    config.decoder_layerdrop = 0.05
    check_experts(config, "text-to-text", 2, "finetune", learns=False)
    with raises_problem("finetune: parallel.experts", "decoder_layerdrop: 0.05", "give experts: 1"):
        check_experts(config, "text-to-text", 2, "finetune")


@pytest.mark.slow
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_a_process_whose_experts_nobody_chooses_takes_part(implementation: str, trains: bool) -> None:
    in_ranks(2, expert_processes.leave_one_without_tokens, implementation, trains)


@pytest.mark.slow
def test_a_process_without_rows_takes_no_room() -> None:
    in_ranks(2, expert_processes.take_part_without_rows)


@pytest.mark.slow
def test_teachers_are_spread() -> None:
    in_ranks(2, expert_processes.teach)


@pytest.mark.parametrize(("device", "strategy", "share", "refused"), [
    ("cuda", "fsdp2", 0.1, True),
    ("cuda", "fsdp2", 0.0, False),  # single rows leave out blocks, which run all the same
    ("cuda", "ddp", 0.1, False),
    ("cpu", "fsdp2", 0.1, False),
])  # fmt: skip
def test_layers_that_gpus_would_leave_out_apart_are_refused_where_others_wait(
    device: str, strategy: Any, share: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foundation.training.allowed.computing_device", lambda: torch.device(device))
    config = BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, vocab_size=40)
    config.encoder_layerdrop, config.drop_path_rate = share, 0.2
    context: Any = SimpleNamespace(task="text-to-text", max_length=16, team=Team(0, 2, strategy), parallel=Parallel(strategy=strategy))
    context.data = SimpleNamespace(train=SimpleNamespace(together=1))
    with raises_problem("finetune: parallel.strategy", "(encoder_layerdrop: 0.1)", "give ddp, or") if refused else nullcontext():
        check_training(Finetune(), config, context, "finetune")
