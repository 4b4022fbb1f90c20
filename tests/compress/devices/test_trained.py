"""What training takes, against torch's own tracker of the tensors of a real training."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from transformers import BertConfig, GPT2Config, LlamaConfig, MixtralConfig

from compress.devices import alive
from compress.devices.activations import Step, numel, phases_of_backward, rows_of, without_memory
from compress.devices.spec import Devices
from compress.devices.trained import Known, Needed, Plan, Training, needed, plans, proposal
from foundation.core.target import Checkpointing
from foundation.labels.tasks import TASKS, Task
from foundation.models.architecture.shapes import auto_class
from foundation.models.library import with_class
from foundation.models.size import inputs_of
from foundation.training.choices import Optimizer, OptimizerName
from foundation.training.few_parameters.lora import Lora, attached
from foundation.training.losses.table import losses_of
from foundation.training.optimizers import optimizer_of
from foundation.training.recompute import recomputed
from tests.training_memory import KINDS, LAYERS, SIZES, Alive

pytestmark = pytest.mark.whole

KEPT: tuple[Checkpointing, ...] = ("none", "selective", "full")

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
SHARED: dict[str, tuple[Task, Any]] = {
    "bert": ("text-classification", BertConfig(**SIZES, **STILL, intermediate_size=512, vocab_size=1000)),
    "gpt2": ("text-generation", GPT2Config(n_embd=128, n_head=4, vocab_size=1000, **QUIET)),
    "llama": ("text-generation", LlamaConfig(**SIZES, intermediate_size=352, num_key_value_heads=4, vocab_size=1000)),
}
"""Models without dropout whose blocks are counted by hand."""


def measured(
    kind: str,
    rows: int,
    length: int,
    *,
    half: bool,
    micro: int | None = None,
    checkpointing: Checkpointing = "none",
    layers: int = LAYERS,
) -> int:
    """Returns the most bytes that tensors take in the second step of a training, by torch's tracker."""
    from torch.distributed._tools.mem_tracker import MemTracker

    task, config = KINDS[kind]
    config = with_class(copy.deepcopy(config), task)
    config.use_cache, config.num_hidden_layers = False, layers
    torch.manual_seed(0)
    model = auto_class(task, config).from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    features = {name: value.repeat(micro or rows, *[1] * (value.ndim - 1)) for name, value in inputs_of(config, task, length).items()}
    tracker = MemTracker()
    tracker.track_external(model, optimizer)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=checkpointing == "none"):
            logits = model(**features).logits.float()
        ids, classes = torch.zeros((len(logits), length - 1), dtype=torch.int32), torch.zeros(len(logits), dtype=torch.int64)
        labels = ids if TASKS[task].generates else classes
        return losses_of(task).labelled(logits, labels).mean()

    with recomputed(model, checkpointing, "model"), tracker:
        for step in range(2):
            for _ in range(rows // (micro or rows)):
                if step or micro:
                    tracker.reset_mod_stats()
                loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "half"), [("bert", False), ("llama", False), ("llama", True), ("vit", True)])
def test_the_peak_is_within_15_percent_of_the_measured_one(kind: str, half: bool) -> None:
    task, config = KINDS[kind]
    predicted = needed(Training(config, task, 8, None, 96, keeps_best=False, half=half), 1)
    assert predicted.peak == pytest.approx(measured(kind, 8, 96, half=half), rel=0.15)


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "half"), [("bert", True), ("llama", False), ("vit", False)])
def test_adapters_take_what_is_measured(kind: str, half: bool) -> None:
    task, config = KINDS[kind]
    lora = Lora(rank=4)
    predicted = needed(Training(config, task, 8, None, 96, keeps_best=False, half=half, lora=lora), 1)
    config = with_class(copy.deepcopy(config), task)
    config.use_cache = False
    model = auto_class(task, config).from_config(config).train()
    attached(model, lora, "finetune")
    features = {name: value.repeat(8, *[1] * (value.ndim - 1)) for name, value in inputs_of(config, task, 96).items()}
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], fused=True)
    generates = TASKS[task].generates
    labels = torch.zeros((8, 95), dtype=torch.int32) if generates else torch.zeros(8, dtype=torch.int64)
    with Alive([*model.parameters(), *model.buffers()]) as alive:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                logits = model(**features).logits.float()
            losses_of(task).labelled(logits, labels).mean().backward()
            del logits
            optimizer.step()
            optimizer.zero_grad()
    assert predicted.peak == pytest.approx(alive.peak, rel=0.15)


@pytest.mark.slow
def test_adapters_by_hand() -> None:
    task, config = KINDS["llama"]
    own = numel(auto_class(task, config).from_config(with_class(copy.deepcopy(config), task)))
    block = 4 * 4 * 2 * 128 - 2 * 4 * 64 + 3 * 4 * (128 + 352)  # two matrices for each layer of 128 or, for keys and values, 64 outputs
    taken = needed(Training(config, task, 8, None, 32, lora=Lora(rank=4)), 1)
    assert (taken.weights, taken.gradients, taken.optimizer) == (4 * (own + LAYERS * block), 4 * LAYERS * block, 8 * LAYERS * block)
    assert taken.host == 4 * LAYERS * block  # the best weights
    away = needed(Training(config, task, 8, None, 32, lora=Lora(rank=4), strategy="fsdp2", offload=True), 2)
    assert away.gradients == 4 * block
    assert away.host == (4 * (own + LAYERS * block) + 4 * LAYERS * block) // 2 + 2 * LAYERS * block + 4 * LAYERS * block


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_takes_what_is_measured_and_less(kind: str, half: bool) -> None:
    task, config = KINDS[kind]
    deep = copy.deepcopy(config)
    deep.num_hidden_layers = 6
    peaks = []
    for kept in KEPT:
        predicted = needed(Training(deep, task, 32, None, 96, keeps_best=False, half=half, checkpointing=kept), 1)
        found = measured(kind, 32, 96, half=half, checkpointing=kept, layers=6)
        assert predicted.peak == pytest.approx(found, rel=0.15), kept
        peaks.append(found)
    assert peaks[0] > 1.2 * peaks[1] > 1.2 * peaks[2]


@pytest.mark.slow
def test_a_block_that_is_computed_again_is_counted_once() -> None:
    task, config = KINDS["bert"]
    own = numel(auto_class(task, config).from_config(with_class(copy.deepcopy(config), task)))
    start = {}
    for kept in KEPT:
        known = Known()
        taken = needed(Training(config, task, 8, None, 96, keeps_best=False, half=False, checkpointing=kept), 1, known)
        [phases] = known.phases.values()
        complete = {phase.trained: phase.saved for phase in phases}
        assert own in complete
        assert list(complete) == sorted(complete)
        assert taken.activations == max(complete.values())
        assert taken.peak == 4 * own + 8 * own + max(4 * own, *(held + 4 * trained for trained, held in complete.items()))
        start[kept] = complete[0]
    assert start["full"] < start["selective"] < start["none"]


def test_gradients_of_micro_batches_count_during_the_next_pass() -> None:
    task, config = KINDS["bert"]
    predicted = needed(Training(config, task, 2, 1, 32, keeps_best=False, half=False), 1)
    assert predicted.accumulates
    assert predicted.peak == pytest.approx(measured("bert", 2, 32, half=False, micro=1), rel=0.15)


@pytest.mark.slow
def test_gradients_that_processes_sum_in_buckets_count_from_the_start() -> None:
    task, config = KINDS["bert"]
    training = Training(config, task, 8, None, 96)
    alone, both = needed(dataclasses.replace(training, batch_size=4), 1), needed(training, 2)
    assert (both.weights, both.gradients, both.activations) == (alone.weights, alone.gradients, alone.activations)
    assert both.peak == both.weights + both.optimizer + both.gradients + both.activations > alone.peak
    sharers = needed(dataclasses.replace(training, context=2), 2)
    assert sharers.peak == sharers.weights + sharers.optimizer + sharers.gradients + sharers.activations
    for other in ({"strategy": "fsdp2"}, {"tensor": 2}, {"tensor": 2, "strategy": "fsdp2"}):  # nothing is summed, or shard by shard
        assert not needed(dataclasses.replace(training, **other), 4).accumulates


@pytest.mark.slow
def test_weights_by_hand() -> None:
    task, config = KINDS["bert"]
    own = numel(auto_class(task, config).from_config(with_class(copy.deepcopy(config), task)))
    alone = needed(Training(config, task, 8, None, 32), 1)
    assert (alone.weights, alone.gradients, alone.optimizer, alone.gathered) == (4 * own, 4 * own, 8 * own, 0)
    assert alone.host == 4 * own  # the best weights
    block = 4 * (128 * 128 + 128) + 2 * 128 * 512 + 128 + 512 + 4 * 128
    sharded = needed(Training(config, task, 8, None, 32, teacher=config, keeps_best=False, strategy="fsdp2"), 4)
    assert sharded.weights == 2 * own  # of the model and its teacher
    assert (sharded.gradients, sharded.optimizer) == (own, 2 * own)
    assert sharded.gathered == 4 * (2 * block + own - LAYERS * block - 1000 * 128)  # the embedding is gathered for its own moment


@pytest.mark.slow
def test_offload_and_gradients_that_accumulate_by_hand() -> None:
    task, config = KINDS["bert"]
    own = numel(auto_class(task, config).from_config(with_class(copy.deepcopy(config), task)))
    block = 4 * (128 * 128 + 128) + 2 * 128 * 512 + 128 + 512 + 4 * 128
    there = Training(config, task, 8, None, 32, strategy="fsdp2")
    away = needed(dataclasses.replace(there, offload=True), 2)
    assert (away.weights, away.gradients, away.optimizer) == (0, 4 * block, 0)
    assert away.host == 4 * own + 2 * own + 4 * own  # two copies of half the weights, half the gradients, half the moments
    assert away.gathered == needed(there, 2).gathered
    assert needed(dataclasses.replace(there, micro_batch_size=1), 2).gradients == 4 * own


@pytest.mark.slow
def test_a_share_of_each_layer_by_hand() -> None:
    task, config = KINDS["bert"]
    training = Training(config, task, 8, None, 32, teacher=config)
    own = numel(auto_class(task, config).from_config(with_class(copy.deepcopy(config), task)))
    matrices = 4 * 128 * 128 + 2 * 128 * 512 + 3 * 128 + 512  # with the biases of what is divided by columns
    part = own - LAYERS * matrices // 2
    shared = needed(dataclasses.replace(training, tensor=2), 2)
    assert (shared.weights, shared.gradients, shared.optimizer) == (4 * 3 * part, 4 * part, 8 * part)  # the best, and the teacher
    assert (shared.gathered, shared.host) == (0, 0)
    both = needed(dataclasses.replace(training, tensor=2, strategy="fsdp2"), 4)
    assert (both.weights, both.gradients, both.optimizer) == (2 * 3 * part, 2 * part, 4 * part)
    block = matrices // 2 + 128 + 128 + 4 * 128  # biases after rows, and norms
    assert both.gathered == 4 * (
        2 * 1000 * 128 + part - LAYERS * block - 1000 * 128
    )  # the embedding is whole, and wider than a share of a block
    # two groups of two devices have half of the rows each, one group has all
    assert both.activations < shared.activations < needed(dataclasses.replace(training, batch_size=16), 2).activations


def test_experts_of_one_device_by_hand() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64)
    task: Task = "text-generation"
    own = numel(auto_class(task, config).from_config(config))
    experts = 2 * 4 * 3 * 32 * 48
    training = Training(config, task, 8, None, 32, experts=2)
    spread = needed(training, 4)
    part = own - experts // 2
    assert (spread.weights, spread.gradients, spread.optimizer) == (4 * 2 * part, 4 * part, 8 * part)  # with the best ones
    both = needed(dataclasses.replace(training, strategy="fsdp2"), 4)
    part = (own - experts) // 4 + experts // 2  # fsdp2 divides all but the experts
    assert (both.weights, both.gradients, both.optimizer) == (4 * 2 * part, 4 * part, 8 * part)
    assert [plan.strategy for plan in plans(training, 4, "nvlink")] == ["ddp", "fsdp2"]


@pytest.mark.first(1)
@pytest.mark.parametrize(("kind", "tensor"), [("bert", 1), ("bert", 2), ("bert", 4), ("gpt2", 2), ("gpt2", 4), ("llama", 2)])
def test_what_a_block_keeps_by_hand(kind: str, tensor: int) -> None:
    """In float32 without dropout, in numbers for each token; Korthikanti et al. 2022 count in bytes of float16: 34 h + 5 a s.

    With t devices that share layers, 10 h of those are whole: what norms and the layers behind them read. With shared tokens nothing is.
    """
    rows, length, h, a, mask = 4, 32, 128, 4, 32  # attention keeps a mask [b, s, s] of each block in every process
    whole, divided = {
        "bert": (4 * h + 4, 4 * h + a + 2 * 4 * h),  # read by layers and norms, 2 figures of a norm | q, k, v, their result, 4 h twice
        "gpt2": (4 * h + 4, 4 * h + a + 5 * 4 * h),  # GELU of several operations keeps more of 4 h
        "llama": (6 * h + 2, 4 * h + a + 4 * 352),  # norms of several operations | SiLU and product of two parts
    }[kind]
    token = 4 * rows * length
    assert kept_by_a_block(kind, tensor, False) == token * (whole + divided // tensor + mask)
    if tensor > 1:
        assert kept_by_a_block(kind, tensor, True) == token * ((whole + divided) // tensor + mask)


def kept_by_a_block(kind: str, tensor: int = 1, sequence: bool = False, context: int = 1) -> int:
    """Bytes that a model of two blocks keeps beyond those of one with one."""
    task, config = SHARED[kind]
    sizes = []
    for layers in (1, 2):
        changed = copy.deepcopy(config)
        changed.num_hidden_layers = layers
        with without_memory(changed, task, tensor, sequence=sequence, context=context) as model:
            features = rows_of(changed, task, 4, 32)
            with alive.Alive((*model.parameters(), *model.buffers(), *features.values())) as counted:
                logits = model(**features).logits
                sizes.append(counted.now)
                del logits
    return sizes[1] - sizes[0]


@pytest.mark.slow
def test_shared_tokens_divide_what_checkpointing_keeps() -> None:
    task, config = KINDS["bert"]
    there = Training(config, task, 8, None, 32, tensor=2, checkpointing="full", half=False)
    apart = needed(dataclasses.replace(there, sequence=True), 2)
    assert apart.activations < needed(there, 2).activations
    same = needed(there, 2)
    assert (apart.weights, apart.gradients, apart.optimizer) == (same.weights, same.gradients, same.optimizer)


@pytest.mark.slow
def test_devices_share_each_layer_where_shards_are_not_enough_and_the_link_is_fast() -> None:
    task, config = KINDS["bert"]
    wide = copy.deepcopy(config)
    wide.intermediate_size = 16 * 512  # one block is most of the model, and fsdp2 gathers it whole
    training = Training(wide, task, 4, 1, 16, keeps_best=False, strategy="fsdp2", checkpointing="full")
    shared = needed(dataclasses.replace(training, tensor=2), 4).peak
    assert shared < needed(training, 4).peak
    memory = round(shared / 0.9) + 2
    assert proposal(training, Devices(4, memory, "nvlink")).changes == ("parallel: {tensor: 2}",)
    assert proposal(training, Devices(4, memory)).changes == ("parallel: {offload: true}",)
    refused = proposal(training, Devices(4, memory, "nvlink"), lambda proposed: proposed.tensor == 1)
    assert refused.changes == ("parallel: {offload: true}",)


@pytest.mark.first(1)
@pytest.mark.parametrize("kind", SHARED)
def test_devices_that_share_tokens_keep_their_part_of_what_blocks_compute(kind: str) -> None:
    whole, half, quarter = (kept_by_a_block(kind, context=context) for context in (1, 2, 4))
    assert half < 0.53 * whole
    assert quarter < 0.53 * half


@pytest.mark.slow
def test_weights_are_sharded_over_those_that_share_tokens_too() -> None:
    task, config = KINDS["bert"]
    training = Training(config, task, 4, 1, 32, strategy="fsdp2")
    alone, together = (needed(dataclasses.replace(training, context=context), 4) for context in (1, 4))
    assert (alone.weights, alone.optimizer) == (together.weights, together.optimizer)
    assert alone.activations > together.activations
    assert together.accumulates  # four rows of a step, one at a time


def test_plans_begin_with_that_of_the_recipe_and_divide_more_and_more() -> None:
    """Of two blocks two devices may hold one each, four may not."""
    task, config = KINDS["bert"]
    training = Training(config, task, 4, None, 16)
    own, sharded, away, stages = Plan("ddp"), Plan("fsdp2"), Plan("fsdp2", offload=True), Plan("ddp", pipeline=2)
    assert plans(training, 1, "nvlink") == [own]
    two, four = Plan("fsdp2", context=2), Plan("fsdp2", context=4)
    fast = [sharded, Plan("fsdp2", 2), Plan("fsdp2", 4), stages, away, two, four]
    assert plans(training, 4, "nvlink") == [own, *fast]
    assert plans(training, 6, "pcie") == [own, sharded, stages, away, Plan("fsdp2", 2), two]
    in_context = dataclasses.replace(training, context=2)
    assert plans(in_context, 4, "pcie") == [Plan("ddp", context=2), two, Plan("fsdp2", offload=True, context=2), four]
    shared = dataclasses.replace(training, tensor=2)
    assert plans(shared, 4, "nvlink") == [Plan("ddp", 2), Plan("fsdp2", 2), Plan("fsdp2", 4), Plan("fsdp2", 2, offload=True)]
    assert plans(dataclasses.replace(training, strategy="fsdp2"), 4, "nvlink") == fast
    deep = copy.deepcopy(config)
    deep.num_hidden_layers = 8
    assert [plan.pipeline for plan in plans(dataclasses.replace(training, config=deep), 8, "pcie")] == [1, 1, 2, 4, 8] + [1] * 7


@pytest.mark.first(1)
@pytest.mark.parametrize("name", ["adamw", "adafactor", "lamb", "lars"])
def test_moments_take_what_the_optimizer_keeps(name: OptimizerName) -> None:
    task, config = KINDS["vit"]
    model = auto_class(task, config).from_config(with_class(copy.deepcopy(config), task))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = optimizer_of(Optimizer(name=name), model, 1e-3, 0.0)
    optimizer.step()
    found = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.numel() > 1 or value.ndim)
    assert needed(Training(config, task, 8, None, 96, optimizer=name), 1).optimizer == found


def tabled(patch: pytest.MonkeyPatch, rows: int, full: int, shards: int) -> Training:
    """Replaces what is counted by the sums of a table; returns a training of eight rows.

    Args:
        patch: Of pytest.
        rows: Bytes for each row on a device, the half of them with selective checkpointing.
        full: The same with full checkpointing.
        shards: Bytes of weights, the half of them on each device with fsdp2, none with offload.
    """
    task, config = KINDS["bert"]

    def counted(training: Training, processes: int, known: Any = None) -> Needed:
        at_once = min(training.batch_size // processes, training.micro_batch_size or training.batch_size)
        kept = {"none": rows, "selective": rows // 2, "full": full}[training.checkpointing]
        weights = 0 if training.offload else shards // (2 if training.strategy == "fsdp2" else 1)
        return Needed(weights, 0, 0, at_once * kept)

    patch.setattr("compress.devices.trained.needed", counted)
    return Training(config, task, 8, None, 128, keeps_best=False)


def held(config: Any, task: Task, rows: int, length: int) -> int:
    return phases_of_backward(Step(config, task, rows, length, half=False))[0].saved  # until the first gradient is complete


@pytest.mark.slow
def test_activations_grow_with_rows_and_layers() -> None:
    task, config = KINDS["bert"]
    one, two = (held(config, task, rows, 64) for rows in (4, 8))
    assert two == pytest.approx(2 * one, rel=0.01)
    deeper = copy.deepcopy(config)
    deeper.num_hidden_layers = 2 * LAYERS
    assert held(deeper, task, 4, 64) > 1.7 * one


def test_the_smallest_change_that_fits_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    training = tabled(monkeypatch, rows=100, full=10, shards=1000)

    def changes(usable: int) -> tuple[str, ...]:
        found = proposal(training, Devices(2, round(usable / 0.9) + 2))
        assert found.fits
        return found.changes

    assert changes(1400) == ()  # four rows on each device
    assert changes(1200) == ("micro_batch_size: 2",)
    assert changes(1100) == ("micro_batch_size: 1",)
    assert changes(1040) == ("parallel: {checkpointing: full}",)
    assert changes(1010) == ("micro_batch_size: 1", "parallel: {checkpointing: full}")
    assert changes(900) == ("parallel: {strategy: fsdp2}",)
    assert changes(400) == ("parallel: {strategy: fsdp2, offload: true}",)
    never = proposal(training, Devices(2, 5))
    assert not never.fits
    assert never.changes == ("micro_batch_size: 1", "parallel: {strategy: fsdp2, checkpointing: full, offload: true}")


def test_a_proposal_that_is_refused_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    training = tabled(monkeypatch, rows=100, full=10, shards=1000)
    given, refused = Devices(2, round(1040 / 0.9) + 2), list[Training]()

    def runs(proposed: Training) -> bool:
        refused.append(proposed)
        return proposed.checkpointing == "none"

    assert proposal(training, given).changes == ("parallel: {checkpointing: full}",)
    assert proposal(training, given, runs).changes == ("parallel: {strategy: fsdp2}",)
    tried = [(one.strategy, one.micro_batch_size, one.checkpointing) for one in refused]
    assert tried[:2] == [("ddp", 2, "none"), ("ddp", 1, "none")]
    assert tried[2:4] == [("ddp", None, "selective"), ("ddp", None, "full")]
    assert tried[-1] == ("fsdp2", None, "none")


@pytest.mark.slow
def test_checkpointing_and_then_shards_take_less() -> None:
    task, config = KINDS["llama"]
    training = Training(config, task, 2, None, 512, keeps_best=False)  # one row on each of two devices
    whole, full = (needed(dataclasses.replace(training, checkpointing=kind), 2).peak for kind in ("none", "full"))
    sharded = needed(dataclasses.replace(training, strategy="fsdp2"), 2).peak
    assert full < sharded < whole


@pytest.mark.slow
def test_fsdp2_is_proposed_where_weights_do_not_fit() -> None:
    """A large vocabulary would be gathered: the layers are what shards."""
    task, config = KINDS["bert"]
    small = copy.deepcopy(config)
    small.vocab_size = 100
    training = Training(small, task, 4, None, 16, keeps_best=False)
    smallest = needed(dataclasses.replace(training, micro_batch_size=1, checkpointing="full"), 4)
    found = proposal(training, Devices(4, round((smallest.peak - smallest.weights / 4) / 0.9)))
    assert found.fits
    assert found.changes == ("parallel: {strategy: fsdp2}",)


def test_the_peak_adds_what_is_there_together() -> None:
    assert Needed(10, 5, 20, 7, 3).peak == 10 + 20 + 3 + 7
    assert Needed(10, 9, 20, 7).peak == 10 + 20 + 9
    assert Needed(10, 9, 20, 7, accumulates=True).peak == 10 + 20 + 9 + 7
