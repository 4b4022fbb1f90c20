"""What a pipeline takes on a device: cells computed by hand, and micro-batches in flight as the schedules of torch have them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import transformers
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from compress.devices.spec import Devices, Link
from compress.devices.trained import Training, in_flight, needed, proposal, proposals
from foundation.core.target import Parallel

pytestmark = pytest.mark.whole

BERT = transformers.BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64)
TABLES = (100 + 512 + 2 + 2) * 32
BLOCK = 4 * (32 * 32 + 32) + (32 * 64 + 64) + (64 * 32 + 32) + 4 * 32
HEAD = (32 * 32 + 32) + (32 * 2 + 2)
TRAINING = Training(BERT, "text-classification", 32, None, 16, pipeline=2)


@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_micro_batches_in_flight_are_those_of_the_schedule(schedule: Any, pipeline: int, times: int) -> None:
    section, parts = Parallel(pipeline=pipeline, schedule=schedule), pipeline * times
    plan: Any = SimpleNamespace(_n_microbatches=parts, _num_stages=pipeline, pp_group_size=pipeline)
    plan.n_local_stages, plan.microbatches_per_round = section.stages_each, pipeline
    for process in range(pipeline):
        if schedule == "1f1b":
            order = Schedule1F1B._get_pipeline_order(plan)[process]  # type: ignore[index]
        else:
            order = ScheduleInterleaved1F1B._calculate_single_rank_operations(plan, process)
        flying, found = [0] * section.stages_each, []
        for action in order:
            if action is not None and action.computation_type.name == "FORWARD":
                flying[action.stage_index // pipeline] += 1
                found.append(tuple(flying))
            elif action is not None and action.computation_type.name == "FULL_BACKWARD":
                flying[action.stage_index // pipeline] -= 1
        assert in_flight(process, parts, section) == found
        assert not any(flying)


@pytest.mark.slow
def test_the_first_stage_holds_tables_and_half_of_the_blocks() -> None:
    found = needed(TRAINING, 2)
    assert found.weights == found.gradients == found.host == 4 * (TABLES + 2 * BLOCK)
    assert found.optimizer == 8 * (TABLES + 2 * BLOCK)
    assert found.accumulates
    assert found.peak == found.weights + found.optimizer + found.gradients + found.activations
    message = 8 * (4 * 16 * 32 * 4)  # gradients of eight micro-batches of four rows of 16 vectors
    whole = needed(Training(BERT, "text-classification", 4, None, 16), 1)  # half of the blocks, of two micro-batches at one time
    assert 0.9 < (found.activations - message) / whole.activations < 1.25
    teacher = needed(Training(BERT, "text-classification", 32, None, 16, teacher=BERT, pipeline=2), 2)
    assert teacher.weights - found.weights == 4 * (TABLES + 4 * BLOCK + HEAD)  # whole in each process


WIDE = transformers.BertConfig(vocab_size=100, hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=4096)
WIDE_BLOCK = 4 * (192 * 192 + 192) + (192 * 4096 + 4096) + (4096 * 192 + 192) + 4 * 192
WIDE_TABLES = (100 + 512 + 2 + 2) * 192


@pytest.mark.slow
def test_a_pipeline_is_proposed_where_shards_do_not_fit() -> None:
    """One wide block on each of four devices: 16 bytes a weight. Shards of it take as many, and two whole blocks besides.

    Six heads divide by two devices and not by four, so that layers cannot be shared by all.
    """
    training = Training(WIDE, "text-classification", 4, None, 4, keeps_best=False)
    stage = 16 * (WIDE_TABLES + WIDE_BLOCK)  # the first has the tables; the last has the head, which is smaller
    found = needed(dataclasses.replace(training, pipeline=4), 4)
    assert found.weights + found.gradients + found.optimizer == stage
    sharded = needed(dataclasses.replace(training, strategy="fsdp2", checkpointing="full"), 4)
    assert sharded.gathered > 4 * 2 * WIDE_BLOCK
    reasons = {}
    for link in get_args(Link):
        given = Devices(4, round(1.005 * found.peak / 0.9), link)
        assert sharded.peak > given.usable
        chosen = proposal(training, given, lambda each: each.tensor == 1 and each.pipeline != 2 and each.checkpointing == "none")
        assert chosen.fits
        assert chosen.changes == ("parallel: {pipeline: 4}",)
        reasons[link] = chosen.reason or ""
    assert "only hidden states go over PCIe" in reasons["pcie"]
    assert "devices cannot share its layers" in reasons["nvlink"]
    assert proposal(training, Devices(4, 10 * found.peak)).reason is None


def test_a_pipeline_stays_one_in_what_is_proposed() -> None:
    tried = list(proposals(TRAINING, 4, Devices(4, 10**9).link))
    assert {each.pipeline for each in tried} == {2}
    assert {(each.strategy, each.tensor, each.offload) for each in tried} == {("ddp", 1, False)}
    assert {each.micro_batch_size for each in tried} == {None, 8, 4, 2, 1}
