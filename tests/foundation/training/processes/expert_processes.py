"""Steps of small mixtures whose experts are spread over processes; run by `test_experts.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foundation.core.progress import ConsoleProgress
from foundation.core.target import Parallel
from foundation.machine.parallel import Team, joined
from foundation.machine.sharding import clip_gradients, full, is_sharded
from foundation.models.layers.expert_parallel import experts_to_spread, stacked_where_listed
from foundation.models.layers.listed_experts import mend
from foundation.training.distillation.distilled import on_devices
from foundation.training.processes.division import divided
from foundation.training.processes.engine import Engine

ROWS, LENGTH, VOCABULARY = 6, 9, 40
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}
_SEQ2SEQ: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 16, "pad_token_id": 0, "decoder_start_token_id": 0}
ROOM: dict[str, Any] = {"expert_capacity": 1000}


def model(kind: str) -> Any:
    """The same model in every process, in training mode, without dropout."""
    import transformers

    mend(kind)
    configs = {
        "mixtral": lambda: transformers.MixtralConfig(num_local_experts=4, **_SIZES),
        "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
            num_experts=4, moe_intermediate_size=12, shared_expert_intermediate_size=8, **_SIZES
        ),
        "gpt_oss": lambda: transformers.GptOssConfig(num_local_experts=4, num_experts_per_tok=2, head_dim=8, **_SIZES),
        "switch_transformers": lambda: transformers.SwitchTransformersConfig(
            d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_heads=2,
            num_experts=4, dropout_rate=0.0, router_jitter_noise=0.0, **ROOM, **_SEQ2SEQ,
        ),
        "nllb-moe": lambda: transformers.NllbMoeConfig(
            encoder_layers=2, decoder_layers=2, encoder_sparse_step=2, decoder_sparse_step=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_experts=4, dropout=0.0, attention_dropout=0.0,
            activation_dropout=0.0, moe_token_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0, **ROOM, **_SEQ2SEQ,
        ),
    }  # fmt: skip
    torch.manual_seed(0)
    config = configs[kind]()
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    made = auto.from_config(config, attn_implementation="eager").train()
    for name, weight in made.named_parameters():  # routers that differ from token to token, and biases
        if weight.ndim > 1 or "bias" in name:
            weight.data.normal_(std=0.2)
    return made


def drawn() -> Tensor:
    """Rows of token ids."""
    return torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def objective(whole: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The loss of every row."""
    extra = {"decoder_input_ids": ids.flip(1)} if whole.config.is_encoder_decoder else {}  # type: ignore[union-attr]
    logits = whole(input_ids=ids, **extra).logits
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten(), reduction="none")
    return {"loss": losses.view(len(ids), -1).mean(dim=1)}


def alone(kind: str, capacity: float | None = None) -> tuple[Tensor, dict[str, Tensor], int]:
    """Returns the losses `[n]`, the gradients and the choices that were dropped in one process, with a naive capacity."""
    plain = model(kind)
    dropped = [0]
    if capacity is not None:
        for module in experts_to_spread(plain).values():
            module.forward = _limited(module, capacity, dropped)
    losses = objective(plain, drawn())["loss"]
    losses.mean().backward()
    return losses.detach(), {name: weight.grad for name, weight in plain.named_parameters()}, dropped[0]


def _limited(module: Any, capacity: float, dropped: list[int]) -> Any:
    """Experts of one process that take no more choices than they have room for, one choice after the other."""
    stock = type(module).forward

    def forward(states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        most = int(np.ceil(capacity * index.numel() / module.num_experts))
        stays = torch.zeros_like(weights)
        taken = [0] * module.num_experts
        for place in torch.argsort(weights.detach().flatten(), descending=True).tolist():
            expert = int(index.flatten()[place])
            if taken[expert] < most:
                taken[expert] += 1
                stays.view(-1)[place] = 1
        dropped[0] += int((stays == 0).sum())
        return stock(module, states, index, weights * stays)

    return forward


def compare(kind: str, experts: int, strategy: str, capacity: float | None = None, parts: int = 1) -> None:
    """Compares a step with spread experts with a step in one process, in every process; raises an error where they differ."""
    losses, gradients, dropped = alone(kind, capacity)
    with joined() as first:
        parallel = Parallel(experts=experts, strategy=strategy, expert_capacity=capacity)  # type: ignore[arg-type]
        team, shared = parallel.of(first), model(kind)
        with stacked_where_listed(shared, spreads=True):
            before = {name: tuple(weight.shape) for name, weight in shared.named_parameters()}
            division = divided(shared, team, parallel, "finetune")
            modules = experts_to_spread(shared)
            assert modules
            for path, module in modules.items():
                for name, weight in module.named_parameters(recurse=False):
                    assert is_sharded(weight)
                    assert tuple(weight.to_local().shape) == (4 // experts, *before[f"{path}.{name}"][1:])  # type: ignore[attr-defined]
            found = _step(shared, division, team, parallel, parts)
            own = team.share(np.arange(ROWS))
            torch.testing.assert_close(found, losses[own], atol=1e-6, rtol=1e-5)
            made = {name: division.whole(name, weight.grad) for name, weight in shared.named_parameters() if weight.grad is not None}
            assert set(made) == set(before)
            norm = sum(float(gradient.square().sum()) for gradient in gradients.values() if gradient is not None) ** 0.5
            assert abs(clip_gradients(shared.parameters(), 1e9) / norm - 1) < 1e-4
            counted = team.total([division.spread.chosen, division.spread.dropped])  # type: ignore[union-attr]
            assert counted[1] == dropped, (counted, dropped)
            assert (dropped > 0) == (capacity is not None)
            division.undo()
        for name, expected in gradients.items():
            if expected is None:  # an expert that no token chose
                continue
            torch.testing.assert_close(_of(made, name), expected, atol=1e-6, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        plain = dict(model(kind).named_parameters())
        whole = dict(shared.named_parameters())
        assert set(whole) == set(plain)
        assert all(torch.equal(full(weight.detach()), plain[name]) for name, weight in whole.items())


def _step(shared: nn.Module, division: Any, team: Team, parallel: Parallel, parts: int) -> Tensor:
    """Computes the gradients of a step in micro-batches; returns the losses of own rows."""
    own = torch.from_numpy(team.share(np.arange(ROWS)))
    engine = Engine(objective, shared, nn.ModuleList([shared]), team, parallel)
    found: list[Tensor] = []
    micro = own.chunk(parts)
    for number in range(parts):
        counts = number < len(micro)
        with engine.micro_batch(last=number == parts - 1):
            terms = engine(drawn()[micro[number] if counts else own[:1]])["loss"]
            ((terms.sum() if counts else 0.0 * terms.sum()) / ROWS).backward()
        found += [terms.detach()] if counts else []
    division.sum_gradients()
    return torch.cat(found)


def _of(made: dict[str, Tensor], name: str) -> Tensor:
    """Returns the gradient of a weight, which may be a part of a stack of experts."""
    if name in made:
        return made[name]
    path, _, rest = name.partition(".expert_")
    number, _, weight = rest.partition(".")
    return made[f"{path}.{weight.replace('.', '_')}"][int(number)]


def count_bytes() -> None:
    """Counts what a step of two processes sends between them, in every process; raises an error where it is not what the formula says."""
    import torch.distributed as dist

    sent = [0]
    send: Any = dist.all_to_all_single

    def counted(into: Tensor, rows: Tensor, received: list[int], parts: list[int], group: Any = None) -> None:
        sent[0] += rows[0].numel() * sum(size for rank, size in enumerate(parts) if rank != dist.get_rank(group)) if len(rows) else 0
        send(into, rows, received, parts, group=group)

    with joined() as first:
        parallel = Parallel(experts=2)
        team, shared = parallel.of(first), model("mixtral")
        division = divided(shared, team, parallel, "finetune")
        away = [0]
        for module in experts_to_spread(shared).values():
            module.register_forward_pre_hook(
                lambda module, args: away.__setitem__(0, away[0] + int((args[1] // 2 != team.expert_rank).sum()))
            )
        dist.all_to_all_single = counted
        try:
            _step(shared, division, team, parallel, 1)
        finally:
            dist.all_to_all_single = send
        chosen_away, sent_by_all = team.total([away[0], sent[0]])
        width = shared.config.hidden_size
        assert chosen_away > 0
        assert sent_by_all == 4 * 4 * width * chosen_away  # there and back, forward and backward, 4 bytes each


def _one_sided(implementation: str, trains: bool) -> Any:
    """A mixture whose tokens all choose experts 0 and 1, which process 0 of two has."""
    made = model("mixtral")
    made.set_experts_implementation(implementation)
    for module in experts_to_spread(made).values():
        for weight in module.parameters():
            weight.requires_grad_(trains)
        module.register_forward_pre_hook(lambda module, args: (args[0], torch.zeros_like(args[1]) + torch.tensor([0, 1]), args[2]))
    return made


def leave_one_without_tokens(implementation: str, trains: bool) -> None:
    """Compares a step in which nobody chooses an expert of process 1 with one process, in every process; raises an error if they differ."""
    plain = _one_sided(implementation, trains)
    losses = objective(plain, drawn())["loss"]
    losses.mean().backward()
    with joined() as first:
        parallel = Parallel(experts=2)
        team, shared = parallel.of(first), _one_sided(implementation, trains)
        division = divided(shared, team, parallel, "finetune")
        found = _step(shared, division, team, parallel, 1)
        torch.testing.assert_close(found, losses[team.share(np.arange(ROWS))].detach(), atol=1e-6, rtol=1e-5)
        expected = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
        made = {name: division.whole(name, weight.grad) for name, weight in shared.named_parameters() if weight.grad is not None}
        assert set(made) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(made[name], gradient, atol=1e-6, rtol=1e-4)


def take_part_without_rows() -> None:
    """A row in process 0 has the room that it has in one process, whatever process 1 runs to take part; raises an error otherwise."""
    plain, dropped = model("mixtral"), [0]
    for module in experts_to_spread(plain).values():
        module.forward = _limited(module, 1.0, dropped)
    expected = objective(plain, drawn()[:1])["loss"]
    expected.sum().backward()
    with joined() as first:
        parallel = Parallel(experts=2, expert_capacity=1.0)
        team, shared = parallel.of(first), model("mixtral")
        division = divided(shared, team, parallel, "finetune")
        assert division.spread is not None
        division.spread.idle = not first.is_first
        engine = Engine(objective, shared, nn.ModuleList([shared]), team, parallel)
        with engine.micro_batch(last=True):
            loss = engine(drawn()[:1])["loss"]
            (loss.sum() * (1.0 if first.is_first else 0.0)).backward()
        if first.is_first:
            torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)
        assert team.total([division.spread.dropped])[0] == dropped[0] > 0
        for name, weight in plain.named_parameters():
            made = division.whole(name, dict(shared.named_parameters())[name].grad)  # type: ignore[arg-type]
            torch.testing.assert_close(made, weight.grad, atol=1e-6, rtol=1e-4)


def teach() -> None:
    """Divides teachers among two processes, in every process; raises an error if a mixture is not spread, or another model is."""
    with joined() as first:
        parallel = Parallel(experts=2)
        for kind, leaves_out in (("switch_transformers", 0.0), ("nllb-moe", 0.1)):
            teacher = model(kind)
            teacher.config.encoder_layerdrop = leaves_out  # only a training leaves out blocks
            context: Any = SimpleNamespace(
                team=parallel.of(first), parallel=parallel, task="text-to-text", max_length=8, progress=ConsoleProgress("silent")
            )
            found = on_devices(teacher, context, "distill.teacher")
            modules = experts_to_spread(found).values()
            assert modules
            assert all(is_sharded(weight) and not weight.requires_grad for module in modules for weight in module.parameters())
