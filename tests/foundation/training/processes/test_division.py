"""Random numbers between column and row layers, and what a training on shared layers refuses; `tests/distill/test_processes.py` trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compress.recipe import check
from compress.run.prepare import prepare
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Parallel
from foundation.machine.parallel import ALONE, Team
from foundation.models.architecture.split import Split, split_of
from foundation.models.checkpoint import load
from foundation.schemes.int8 import LayerScales, weight_scale
from foundation.training.few_parameters.lora import Lora, adapted
from foundation.training.processes.division import Division, _bare, _draw_apart_in, _OwnDropout, _reorder, divided, ends_of, in_model
from foundation.training.processes.layer_share import shared_axes
from quantize.training.low_rank import changed_by_low_rank
from quantize.training.qat import insert
from tests.problems import raises_problem

pytestmark = pytest.mark.whole


class Shares(nn.Module):
    """A column and a row layer with dropout before, between and after."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.column, self.row = nn.Identity(), nn.Identity()
        region = _OwnDropout(rank)
        self.column.register_forward_pre_hook(region.begin)
        self.row.register_forward_pre_hook(region.end)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drop = nn.functional.dropout
        before = drop(x, 0.5, self.training)
        inside = drop(self.column(x), 0.5, self.training)
        return before, inside, drop(self.row(x), 0.5, self.training)


def drawn(rank: int, *, training: bool = True, broken_off: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    model, x = Shares(rank).train(training), torch.ones(200)
    if broken_off:  # as a second run of activation checkpointing is, after which torch restores the generator
        state = torch.get_rng_state()
        model.column(x)
        torch.set_rng_state(state)
    return [*model(x), *model(x)]


def test_each_process_drops_its_own_between_the_layers_and_all_the_same_elsewhere() -> None:
    with torch.random.fork_rng():
        mine, theirs, again = drawn(0), drawn(1), drawn(1)
        assert [torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)] == [True, False, True] * 2
        assert all(map(torch.equal, theirs, again))
        assert not torch.equal(mine[1], mine[4])  # nor is a region the same in the next step
        assert all(map(torch.equal, drawn(1, broken_off=True), theirs))
        assert all(torch.equal(a, torch.ones(200)) for a in drawn(0, training=False))


def test_two_regions_one_after_the_other_drop_different_entries() -> None:
    region, layer, x = _OwnDropout(0), nn.Identity(), torch.ones(200)
    found = []
    with torch.random.fork_rng():
        for _ in range(2):
            region.begin(layer, (x,))
            found.append(nn.functional.dropout(x, 0.5))
            region.end(layer, (x,))
    assert not torch.equal(*found)


def test_an_adapter_of_a_column_layer_drops_the_same_in_all_processes() -> None:
    """It reads what is whole, although random numbers differ around it."""

    def found(rank: int) -> list[Tensor]:
        region, adapter, x = _OwnDropout(rank), nn.Dropout(0.5), torch.ones(200)
        adapter.register_forward_pre_hook(region.swap)
        adapter.register_forward_hook(region.swap)
        torch.manual_seed(0)
        region.begin(nn.Identity(), (x,))
        made = [adapter(x), nn.functional.dropout(x, 0.5), adapter(x), nn.functional.dropout(x, 0.5)]
        region.end(nn.Identity(), (x,))
        assert torch.equal(adapter.eval()(x), x)
        return [*made, nn.functional.dropout(x, 0.5)]

    with torch.random.fork_rng():
        mine, theirs = found(0), found(1)
    assert [torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)] == [True, False, True, False, True]
    assert not torch.equal(mine[0], mine[2])
    assert not torch.equal(mine[1], mine[3])


@pytest.mark.parametrize("low_rank", [False, True])
def test_adapted_and_int8_layers_are_shared_like_plain_ones(low_rank: bool, tiny_bert: Path) -> None:
    model = load(tiny_bert)
    expected = split_of(model, 2, "finetune")
    with adapted(model, Lora(rank=2), 0, "finetune"):
        assert split_of(_bare(model), 2, "finetune") == expected
    layers = {name: model.get_submodule(name) for name in (*expected.columns, *expected.rows)}
    scales = {name: LayerScales(weight_scale(layer.weight, 127), torch.tensor(1.0), 8) for name, layer in layers.items()}  # type: ignore[arg-type]
    insert(model, scales, {name: name for name in scales})
    with changed_by_low_rank(model, Lora(rank=2) if low_rank else None, 0, "quantize"):
        assert split_of(_bare(model), 2, "quantize") == expected
        for name in layers:
            of_outputs, of_inputs = shared_axes(model.get_submodule(name))
            tensors = {**dict(model.get_submodule(name).named_parameters()), **dict(model.get_submodule(name).named_buffers())}
            outputs, inputs = layers[name].weight.shape  # type: ignore[union-attr]
            assert all(tensors[each].shape[axis] == outputs for each, axis in of_outputs.items())
            assert all(tensors[each].shape[axis] == inputs for each, axis in of_inputs.items() if each in tensors)


def test_an_order_is_undone_when_a_weight_is_whole_again() -> None:
    model: Any = nn.Module()
    model.fused = nn.Linear(3, 12)
    before = {name: value.clone() for name, value in model.named_parameters()}
    orders = _reorder(model, Split(2, {"fused": (4, 4, 4), "plain": (6,)}, (), (), {}))
    assert set(orders) == {"fused.weight", "fused.bias"}
    division = Division(model, None, orders)
    for name, value in model.named_parameters():
        assert torch.equal(value[:6], before[name][[0, 1, 4, 5, 8, 9]])  # the first process has the first half of each part
        assert torch.equal(division.whole(name, value.detach()), before[name])
        assert torch.equal(division.part(name, value.detach(), before[name]), value)
    count = torch.tensor(7.0)  # of steps, which an optimizer keeps beside the moments
    assert division.whole("fused.weight", count) is division.part("fused.weight", count, count) is count


def test_without_processes_a_model_stays_as_it_is() -> None:
    model = nn.Linear(2, 2)
    division = divided(model, ALONE, Parallel(), "finetune")
    division.undo()
    assert division.plain is None
    assert division.model is model


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("now.0.bert.pooler.bias", "bert.pooler.bias"),
        ("best.0.head.weight", "head.weight"),
        ("optimizer.exp_avg.0.head.weight", "head.weight"),
        ("optimizer.step.1.projection.weight", ""),
        ("now.1.projection.weight", ""),
    ],
)
def test_entries_of_a_checkpoint_name_the_weight_in_the_model(entry: str, name: str) -> None:
    assert in_model(entry) == name


def checked(stage: str, settings: dict[str, Any], folder: Path, sequence: bool = False, context: int = 1) -> None:
    """Checks a recipe that ends in a stage for two processes that share layers, or tokens; nothing runs."""
    parallel = Parallel(context=context) if context > 1 else Parallel(tensor=2, sequence=sequence)
    model = {"model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 48, "num_hidden_layers": 2}
    model |= {"num_attention_heads": 4, "intermediate_size": 64}
    raw = {
        "name": "tiny",
        "model": {"config": model, "init": "random", "task": "image-classification", "head": "new"},
        "data": {"path": "sklearn:digits"},
        "parallel": parallel.model_dump(),
        "stages": [*([] if stage == "finetune" else [{"finetune": {}}]), {stage: settings}],
    }
    prepare(check(raw), folder, ConsoleProgress("silent"), parallel.of(Team(0, 2))).count_macs()


@pytest.mark.parametrize(
    ("stage", "settings", "message"),
    [
        ("finetune", {"optimizer": {"name": "adafactor"}}, r"finetune\.optimizer: adafactor given with parallel: \{tensor: 2\}"),
        ("prune", {"sparsity": 0.5}, r"prune\.divisible_by: not given; 2 processes share the heads .*: give 2"),
        ("distill", {"student": {"layers": 1}, "loss": "minilmv2"}, r"distill\..*: minilmv2 compares attention, whose heads"),
        ("distill", {"student": {"layers": 1}, "loss": "mixkd"}, r"distill\..*: mixkd needs the whole embeddings, which .*tensor: 2"),
        (
            "distill",
            {"student": {"layers": 1, "hidden": 36, "heads": 3}},
            r"distill: parallel\.tensor: 2 given; block 0 has 3 heads \(nearest .* 2 or 4\)",
        ),
    ],
)
def test_what_does_not_work_on_shared_layers_is_told_before_the_run(
    stage: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"^stages\.{message}"):
        checked(stage, settings, tmp_path)


@pytest.mark.parametrize(
    ("stage", "settings", "message"),
    [
        ("finetune", {"lora": {}}, r"finetune\.lora: given with parallel\.sequence: true; adapters read all tokens"),
        ("quantize", {"mode": "qat"}, r"quantize\.mode: qat given with parallel\.sequence: true; layers that compute in integers"),
        (
            "distill",
            {"student": {"layers": 1}, "losses": [{"name": "hidden"}]},
            r"distill\..*: hidden compares hidden states, whose tokens",
        ),
        (
            "prune",
            {"sparsity": 0.5, "divisible_by": 2, "recover": {"hidden_weight": 0.5}},
            r"prune\.recover\.hidden_weight: 0\.5 given with parallel\.sequence: true",
        ),
    ],
)
def test_what_does_not_work_on_shared_tokens_is_told_before_the_run(
    stage: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=rf"^stages\.{message}.*give sequence: false"):
        checked(stage, settings, tmp_path, sequence=True)


@pytest.mark.parametrize(
    ("stage", "settings", "message"),
    [
        (
            "distill",
            {"student": {"layers": 1}, "losses": [{"name": "hidden"}]},
            r"distill\..*: hidden compares hidden states, whose tokens",
        ),
        ("distill", {"student": {"layers": 1}, "loss": "minilmv2"}, r"distill\..*: minilmv2 compares attention, whose tokens"),
        (
            "prune",
            {"sparsity": 0.5, "recover": {"hidden_weight": 0.5}},
            r"prune\.recover\.hidden_weight: 0\.5 given with parallel\.context: 2",
        ),
        ("prune", {"sparsity": 0.5, "method": "joint"}, r"prune\.method: learns masks, given with parallel\.context: 2"),
    ],
)
def test_what_does_not_work_in_context_is_told_before_the_run(stage: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^stages\.{message}.*give context: 1"):
        checked(stage, settings, tmp_path, context=2)


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        ("finetune", {"lora": {}}),
        ("finetune", {"optimizer": {"name": "adafactor"}}),
        ("distill", {"student": {"layers": 1, "hidden": 36, "heads": 3}, "loss": "soft_target"}),
        ("prune", {"sparsity": 0.5}),
        ("quantize", {"mode": "qat"}),
    ],
)
def test_what_works_in_context_is_not_refused(stage: str, settings: dict[str, Any], tmp_path: Path) -> None:
    checked(stage, settings, tmp_path, context=2)


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        ("finetune", {}),
        ("distill", {"student": {"layers": 1}, "loss": "soft_target"}),
        ("prune", {"sparsity": 0.5, "divisible_by": 2}),
        ("quantize", {}),
    ],
)
def test_what_works_on_shared_tokens_is_not_refused(stage: str, settings: dict[str, Any], tmp_path: Path) -> None:
    checked(stage, settings, tmp_path, sequence=True)


def test_processes_draw_apart_from_the_first_block_to_the_last_and_alike_elsewhere() -> None:
    def found(rank: int) -> list[Tensor]:
        blocks = [nn.Dropout(0.5), nn.Dropout(0.5)]
        _draw_apart_in(blocks, rank)
        torch.manual_seed(0)
        x = torch.ones(200)
        return [nn.functional.dropout(x, 0.5), blocks[0](x), blocks[1](x), nn.functional.dropout(x, 0.5)]

    with torch.random.fork_rng():
        mine, theirs = found(0), found(1)
    assert [torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)] == [True, False, False, True]
    assert not torch.equal(mine[1], mine[2])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"sequence": True}, "sequence: true given without tensor"),
        ({"tensor": 2, "context": 2}, "tensor: 2 given with context: 2, whose processes have whole layers: leave one of them out"),
        ({"pipeline": 2, "context": 2}, "pipeline: 2 given with context: 2, whose processes have whole layers"),
    ],
)
def test_sections_that_say_nothing_that_can_be_done_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parallel(**section)


def test_a_plan_says_whether_tokens_are_shared() -> None:
    team = Parallel(tensor=2, sequence=True).of(Team(0, 4))
    assert (team.plan, team.settings) == ("ddp, tensor 2 with sequence", "tensor: 2, sequence: true")
    team = Parallel(context=2, strategy="fsdp2").of(Team(3, 4))
    assert (team.plan, team.settings) == ("fsdp2, context 2", "context: 2")
    assert (team.data_rank, team.data_size, team.context_rank, team.stream) == (1, 2, 1, 1)
    with raises_problem("parallel.context", "3", "4 processes", "give 1 or 2 or 4"):
        Parallel(context=3).of(Team(0, 4))


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        ("finetune", {}),
        ("prune", {"sparsity": 0.5, "divisible_by": 2}),
        ("prune", {"sparsity": 0.5, "recover": None}),
        ("distill", {"student": {"layers": 1}, "losses": [{"name": "hidden"}]}),
        ("distill", {"student": {"layers": 1}, "loss": "relational"}),  # both processes have all rows
        ("quantize", {}),
        ("quantize", {"mode": "qat"}),
        ("quantize", {"mode": "auto", "qat": {"lora": {}}}),
        ("finetune", {"lora": {}}),
        ("finetune", {"lora": {"dropout": 0.1}}),
    ],
)
def test_what_works_on_shared_layers_is_not_refused(stage: str, settings: dict[str, Any], tmp_path: Path) -> None:
    checked(stage, settings, tmp_path)


def test_ends_are_gathered_for_their_own_moment_unless_they_are_one_weight() -> None:
    import transformers as hub

    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    untied = hub.LlamaForCausalLM(hub.LlamaConfig(**sizes, tie_word_embeddings=False))
    assert ends_of(untied) == [untied.model.embed_tokens, untied.lm_head]
    assert ends_of(hub.LlamaForCausalLM(hub.LlamaConfig(**sizes, tie_word_embeddings=True))) == []
    bert = hub.BertForSequenceClassification(hub.BertConfig(**sizes))
    assert ends_of(bert) == [bert.bert.embeddings.word_embeddings]
    images = {name: size for name, size in sizes.items() if name != "vocab_size"}
    assert ends_of(hub.ViTForImageClassification(hub.ViTConfig(**images, image_size=8, patch_size=4))) == []
    sounds = hub.Wav2Vec2Config(**sizes, num_conv_pos_embedding_groups=2, conv_dim=[8], conv_kernel=[4], conv_stride=[2])
    assert ends_of(hub.Wav2Vec2ForCTC(sounds)) == []
