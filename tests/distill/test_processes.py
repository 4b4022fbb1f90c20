"""Several processes: they come to what one process comes to, go on after a kill, and fail with one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from distill.distill import Distill
from foundation.machine.parallel import ALONE, Strategy, Team
from foundation.models.checkpoint import load
from foundation.stage.stage import Stage
from foundation.training.finetune import Finetune
from prune.prune import Prune
from prune.sparsify.sparsify import Sparsify
from quantize.quantize import Quantize
from tests import tiny_language_models
from tests.distill import processes, rows_together
from tests.once import made_once
from tests.ranks import in_ranks

pytestmark = [pytest.mark.whole, pytest.mark.timeout(3600)]  # the trainings of a part, before its first test

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def launch(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCHELASTIC_ERROR_FILE": ""}
    return subprocess.run([*LAUNCH, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=3600)


Results = tuple[Path, dict[str, Any], dict[str, Any]]
"""The folder of all trainings, the figures of one process, and those of several."""


@pytest.fixture(scope="module")
def results(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The trainings of every run of the tests."""
    return once("quick", checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def more_results(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The trainings of slow tests."""
    return once("slow", checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def results_of_tokens(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The trainings of slow tests whose processes share tokens."""
    return once("tokens", checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def results_of_tokens_in_four(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same with four processes."""
    return once("tokens in four", checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def results_of_tokens_in_eight(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same with eight processes."""
    return once("tokens in eight", checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def results_of_context(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The trainings of slow tests whose processes share tokens and hold whole layers."""
    return once("context", checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def results_of_context_in_four(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same with four processes."""
    return once("context in four", checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def results_of_four(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The trainings of slow tests with four processes."""
    return once("four", checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def results_of_experts(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The trainings of slow tests whose processes spread the experts of a mixture."""
    return once("experts", checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def results_of_experts_in_four(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same with four processes."""
    return once("experts in four", checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def results_of_groups(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The trainings of slow tests on rows that belong together."""
    return once("groups", checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def results_of_groups_in_three(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same with three processes, which deal out no batch evenly."""
    return once("groups in three", checkpoint, tmp_path_factory)


@pytest.fixture(scope="module")
def results_of_groups_in_four(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same with four processes."""
    return once("groups in four", checkpoint, tmp_path_factory)


def once(part: str, checkpoint: Callable[..., Path], factory: pytest.TempPathFactory) -> Results:
    """Trains a part in one of the workers of a test run: each would take minutes."""
    found: Results = made_once(factory, f"processes {part}", lambda folder: trained(part, checkpoint, folder))
    return found


def trained(part: str, checkpoint: Callable[..., Path], folder: Path) -> Results:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "still").symlink_to(checkpoint("bert", **still))
    (folder / "odd").symlink_to(checkpoint("bert", **still))
    (folder / "ordered").symlink_to(checkpoint("bert", num_labels=1, **still))
    (folder / "dropping").symlink_to(checkpoint("bert"))
    (folder / "fused").symlink_to(checkpoint("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    for name, settings in processes.WRITES.items():
        tiny_language_models.write(folder / name, **settings)
    for name in processes.kinds_of(part) & {*rows_together.KINDS}:
        rows_together.write(folder / name, name)
    patched = processes.train.autocast_dtype, processes.teacher_logits.autocast_dtype
    try:
        processes.killed_alone(folder, part)
        count = {"three": 3, "four": 4, "eight": 8}.get(part.rpartition(" ")[2], 2)
        in_ranks(count, processes.together, folder, part)
        ours = processes.alone(folder, part) | (processes.moved_to_one(folder, part) if processes.moved_in(part) else {})
    finally:
        processes.train.autocast_dtype, processes.teacher_logits.autocast_dtype = patched
    return folder, ours, json.loads((folder / "results.json").read_text())


def cases(part: str) -> list[tuple[str, str]]:
    return [(plan, case) for plan, (_, names) in processes.PLANS[part].items() for case in names]


@pytest.mark.parametrize(("strategy", "case"), cases("quick"))
def test_two_processes_come_to_what_one_comes_to(strategy: str, case: str, results: Results) -> None:
    compare(strategy, case, results, steps=12)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "case"), cases("slow"))
def test_two_processes_come_to_what_one_comes_to_in_all_plans(strategy: str, case: str, more_results: Results) -> None:
    compare(strategy, case, more_results)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "case"), cases("tokens"))
def test_two_processes_that_share_tokens_come_to_what_one_comes_to(strategy: str, case: str, results_of_tokens: Results) -> None:
    compare(strategy, case, results_of_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "case"), cases("tokens in four"))
def test_four_processes_that_share_tokens_come_to_what_one_comes_to(strategy: str, case: str, results_of_tokens_in_four: Results) -> None:
    compare(strategy, case, results_of_tokens_in_four)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "case"), cases("tokens in eight"))
def test_eight_processes_that_share_tokens_come_to_what_one_comes_to(strategy: str, case: str, results_of_tokens_in_eight: Results) -> None:
    compare(strategy, case, results_of_tokens_in_eight)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "case"), cases("context"))
def test_two_processes_in_context_come_to_what_one_comes_to(strategy: str, case: str, results_of_context: Results) -> None:
    compare(strategy, case, results_of_context)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "case"), cases("context in four"))
def test_four_processes_in_context_come_to_what_one_comes_to(strategy: str, case: str, results_of_context_in_four: Results) -> None:
    compare(strategy, case, results_of_context_in_four)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "case"), cases("four"))
def test_four_processes_come_to_what_one_comes_to(strategy: str, case: str, results_of_four: Results) -> None:
    compare(strategy, case, results_of_four)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "case"), cases("experts"))
def test_two_processes_that_spread_experts_come_to_what_one_comes_to(strategy: str, case: str, results_of_experts: Results) -> None:
    compare(strategy, case, results_of_experts)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "case"), cases("experts in four"))
def test_four_processes_that_spread_experts_come_to_what_one_comes_to(
    strategy: str, case: str, results_of_experts_in_four: Results
) -> None:
    compare(strategy, case, results_of_experts_in_four)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "case"), cases("groups"))
def test_two_processes_compare_the_rows_that_one_compares(strategy: str, case: str, results_of_groups: Results) -> None:
    compare(strategy, case, results_of_groups)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "case"), cases("groups in three"))
def test_three_processes_compare_the_rows_that_one_compares(strategy: str, case: str, results_of_groups_in_three: Results) -> None:
    compare(strategy, case, results_of_groups_in_three)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "case"), cases("groups in four"))
def test_four_processes_compare_the_rows_that_one_compares(strategy: str, case: str, results_of_groups_in_four: Results) -> None:
    compare(strategy, case, results_of_groups_in_four)


WANDERING = {
    "order": 1e-3,
    "fused": 1e-3,
    "adafactor": 1e-3,
    "adapters": 1e-3,
    "eight bits": 2e-3,
    "int8 low rank": 2e-3,
    "int8 fused": 2e-3,
    "int8 pairs": 7e-3,
}
"""Trainings that rounding turns, and how far their losses may part. One process parts from itself by 6e-4, 3e-4, 4e-4, 3e-4, 5e-3,
2e-2, 1e-2 and 6e-3 where its first weights differ by 1e-7: codes flip, and biases of keys, which change nothing but by rounding, get full
steps."""


def compare(strategy: str, case: str, results: Results, steps: int | None = None) -> None:
    folder, ours, both = results
    one, two = ours[case], both[f"{strategy} {case}"]
    assert one["steps"] == two["steps"] == (steps or {"answers": 10, "states": 10, "order": 30}.get(case, 50))
    together = (
        strategy.startswith(("tensor", "pipeline", "context")) and "and" not in strategy
    )  # both hold one model, so both have all rows
    share = two["rows"] / one["rows"]
    in_four = ("ddp of four", "experts and ddp", "experts and fsdp2", "experts of four")
    least = {"ddp of three": 1 / 3, **dict.fromkeys(in_four, 0.25)}.get(strategy, 0.5)
    assert share == 1 if together else least <= share < least + 0.2  # the larger half of a batch of five, or of three groups
    assert two["alike"]
    assert [entry.keys() for entry in one["losses"]] == [entry.keys() for entry in two["losses"]]
    for mine, theirs in zip(one["losses"], two["losses"], strict=True):
        for name, value in mine.items():
            assert theirs[name] == pytest.approx(value, abs=WANDERING.get(case, 1e-4)), name
    # AdamW would hide a mean in the place of a sum; gates that have just closed make the norm of single steps jump
    alike = 10 if case in WANDERING else len(one["norms"])
    assert one["norms"][:alike] == pytest.approx(two["norms"][:alike], rel=0.3 if case in processes.LEARNED else 0.05)
    assert [entry["step"] for entry in one["selection"]] == [entry["step"] for entry in two["selection"]]
    values = [[entry["value"] for entry in side["selection"]] for side in (one, two)]
    # heads of a share are summed in another order, so that an input between two codes may get the other one in an evaluation
    # what `relational` says nothing of turns the vectors, and two of them change places in an order
    turned = 2e-3 if case == "related pairs" else 0
    between = 1e-4 if case.startswith("int8") and strategy.startswith(("tensor", "context")) else 0
    assert values[0] == pytest.approx(values[1], rel=1e-5, abs=max(between, turned, WANDERING.get(case, 0)))
    assert steps or case in ("answers", "states", "int8 pairs") or one["losses"][-1]["loss"] < one["losses"][0]["loss"]
    a, b = (load(folder / place / case).state_dict() for place in ("alone", strategy))
    assert a.keys() == b.keys()
    apart = {name: float((a[name].double() - b[name].double()).abs().mean()) for name in a}
    # A bias of the keys shifts all scores of a query alike: its gradient is 0 but for rounding, which AdamW brings to full size.
    # So does the bias of a head whose scores are compared with each other alone.
    keys: tuple[str, ...] = ("key.bias", "k_proj.bias")
    # Distances and angles between rows say nothing of what is added to all rows: the last bias.
    keys += {"relations": ("layer.1.output.LayerNorm.bias",), "related pairs": ("layer.0.output.LayerNorm.bias",)}.get(case, ())
    keys += ("c_attn.bias",) if "words" in case or "fused" in case else ("classifier.bias",) if case == "order" else ()
    most = 3e-4 if case in processes.LEARNED else 1e-4 if case in processes.CUT else 1e-5  # two trainings, the first one before the cut
    assert max(value for name, value in apart.items() if not name.endswith(keys)) < most, apart
    assert not list((folder / strategy / f"{case}.1").iterdir())  # the second process writes nothing


@pytest.mark.parametrize(("part", "strategy", "stage"), [case for case in processes.KILLED_IN if case[0] == "quick"])
def test_killed_processes_continue_to_equal_bits(part: str, strategy: str, stage: str, results: Results) -> None:
    continued(strategy, stage, results)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "strategy", "stage"), [case for case in processes.KILLED_IN if case[0] != "quick"])
def test_killed_processes_of_all_plans_continue_to_equal_bits(part: str, strategy: str, stage: str, request: pytest.FixtureRequest) -> None:
    name = "more_results" if part == "slow" else f"results_of_{part.replace(' ', '_')}"
    continued(strategy, stage, request.getfixturevalue(name))


def continued(strategy: str, stage: str, results: Results) -> None:
    folder, _, both = results
    whole, resumed = (load_file(folder / strategy / f"{name}-{stage}" / "model.safetensors") for name in ("whole", "resumed"))
    found = both[f"{strategy} resumed {stage}"]
    assert found["steps"] == 10
    assert found["alike"]  # what dropout leaves is the same wherever weights are whole
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("plan", processes.moved_in("quick"))
def test_a_training_goes_on_with_another_number_of_processes(plan: str, results: Results) -> None:
    moved(plan, results)


@pytest.mark.slow
@pytest.mark.parametrize("plan", processes.moved_in("slow"))
def test_a_training_goes_on_with_another_number_of_processes_in_all_plans(plan: str, more_results: Results) -> None:
    moved(plan, more_results)


@pytest.mark.slow
@pytest.mark.parametrize("plan", processes.moved_in("tokens"))
def test_a_training_goes_on_with_processes_that_share_tokens_or_one(plan: str, results_of_tokens: Results) -> None:
    moved(plan, results_of_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("plan", processes.moved_in("context"))
def test_a_training_goes_on_with_processes_in_context_or_one(plan: str, results_of_context: Results) -> None:
    moved(plan, results_of_context)


@pytest.mark.slow
@pytest.mark.parametrize("plan", processes.moved_in("four"))
def test_a_training_goes_on_with_four_processes_or_one(plan: str, results_of_four: Results) -> None:
    moved(plan, results_of_four)


def moved(plan: str, results: Results) -> None:
    folder, ours, both = results
    whole = ours["from none"]
    assert len(whole["norms"]) == 10
    expected = load(folder / "alone" / "from none").state_dict()
    for resumed, place in ((ours[f"from {plan}"], folder / "alone" / f"from {plan}"), (both[f"to {plan}"], folder / plan / "moved")):
        assert len(resumed["norms"]) == 6  # four steps were taken before the kill
        for mine, theirs in zip(resumed["losses"], whole["losses"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
        for name, value in load(place).state_dict().items():
            if not name.endswith("key.bias"):
                assert float((value - expected[name]).abs().mean()) < 1e-5, name


def test_int8_training_in_two_processes_ends_in_the_integers_of_one(results: Any) -> None:
    same_integers(results[0], ("alone", "ddp"), "int8")


@pytest.mark.slow
def test_int8_training_of_shards_ends_in_the_integers_of_one(more_results: Any) -> None:
    same_integers(more_results[0], ("alone", "fsdp2"), "int8")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["int8", "int8 low rank", "int8 fused"])
def test_shared_layers_end_in_the_integers_of_whole_ones(case: str, more_results: Any) -> None:
    same_integers(more_results[0], ("alone", "tensor"), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["int8", "int8 low rank", "int8 fused"])
def test_groups_of_processes_end_in_the_integers_of_one(case: str, results_of_four: Any) -> None:
    same_integers(results_of_four[0], ("alone", "tensor and fsdp2"), case)


def same_integers(folder: Path, places: tuple[str, ...], case: str) -> None:
    codes, found = [], []
    for place in places:
        weights, scales = (load_file(folder / place / case / name) for name in ("model.safetensors", "quantization.safetensors"))
        layers = [name.removesuffix(".weight_scale") for name in scales if name.endswith(".weight_scale")]
        assert len(layers) in (16, 24)  # of four blocks
        turned = "gpt2" in json.loads((folder / place / case / "config.json").read_text())["model_type"]
        whole = {layer: weights[f"{layer}.weight"].T if turned else weights[f"{layer}.weight"] for layer in layers}
        codes.append({layer: (whole[layer] / scales[f"{layer}.weight_scale"][:, None]).round() for layer in layers})
        found.append(scales)
    assert all(torch.equal(codes[0][layer], other[layer]) for other in codes[1:] for layer in codes[0])
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, scale in found[0].items():
            torch.testing.assert_close(other[name], scale, rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "fsdp2", "tensor", "pipeline"])
def test_zeros_stay_where_one_process_has_them(plan: str, more_results: Any) -> None:
    same_zeros(more_results[0], plan)


def same_zeros(folder: Path, plan: str) -> None:
    alone, other = (load(folder / place / "zeros").state_dict() for place in ("alone", plan))
    zeros = {name: value == 0 for name, value in alone.items() if "layer" in name and value.ndim == 2}
    assert sum(int(zero.sum()) for zero in zeros.values()) == pytest.approx(0.5 * sum(zero.numel() for zero in zeros.values()), rel=0.01)
    assert all(torch.equal(zero, other[name] == 0) for name, zero in zeros.items())


@pytest.mark.parametrize(
    "stage",
    [
        Quantize(),
        Quantize(mode="qat"),
        Quantize(mode="auto"),
        Prune(recover=None),
        Prune(),
        Prune(method="joint", recover=None),
        Sparsify(method="lasso", pattern={"block": [4, 4]}, recover=None),  # type: ignore[arg-type]
        Sparsify(method="magnitude", recover=None),
        Sparsify(method="magnitude"),
        Finetune(),
        Distill(student={"layers": 2}),  # type: ignore[arg-type]
    ],
    ids=lambda stage: f"{stage.NAME}-{getattr(stage, 'mode', '')}{'' if getattr(stage, 'recover', 1) else '-not-recovered'}",
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_stages_that_train_take_all_processes_and_others_the_first(stage: Stage, strategy: Strategy) -> None:
    processes = Team(1, 2, strategy)
    learns = getattr(stage, "method", "") in ("joint", "lasso")
    trains = (getattr(stage, "recover", True) is not None or learns) and getattr(stage, "mode", "qat") != "ptq"
    assert stage.team(processes) == (processes if trains else ALONE)
    assert stage.team(ALONE) is ALONE


def test_a_checkpoint_of_a_divided_model_is_the_stock_one(results: Any) -> None:
    from transformers import AutoModelForSequenceClassification

    folder, _, both = results
    assert both["ranks"] == [0.0, 1.0]
    names = [sorted(path.name for path in (folder / place / "finetune").iterdir()) for place in ("alone", "ddp", "fsdp2")]
    assert names[0] == names[1] == names[2]
    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(folder / "fsdp2" / "finetune")
    assert type(model).__name__ == json.loads((folder / "fsdp2" / "finetune" / "config.json").read_text())["architectures"][0]


RECIPE = (
    processes.RECIPE
    + """
  - finetune: {epochs: 0.1, learning_rate: 1.0e-3}
  - distill: {student: {layers: 2}, epochs: 0.1}
  - prune: {sparsity: 0.3, schedule: cubic, iterations: 2, recover: {epochs: 0.2, loss: pkd}}
  - quantize: {mode: qat, qat: {epochs: 0.1}}
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_run_of_two_processes_leaves_the_files_of_one(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("STRATEGY", strategy))
    outcome = launch("-m", "cli", "run", str(recipe), "--out", str(tmp_path / "two"))
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    assert outcome.stdout.count("report.html") == 1
    assert outcome.stderr.count("\nfinetune: running") == 1
    command = [sys.executable, "-m", "cli", "run", str(recipe), "--out", str(tmp_path / "one")]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=200)
    paths = [[str(path.relative_to(tmp_path / name)) for path in (tmp_path / name).rglob("*")] for name in ("one", "two")]
    files = [sorted(re.sub(r"-([0-9a-f]{8}|[0-9a-f]{16})\b", "", path) for path in found) for found in paths]
    assert files[0] == files[1]
    log = [[line.split(" ", 1)[1] for line in (tmp_path / name / "log.txt").read_text().splitlines()] for name in ("one", "two")]
    log = [[line.split()[0] for line in lines if not line.endswith("s left")] for lines in log]  # how often a bar speaks depends on time
    assert log[0] == log[1]
    again = launch("-m", "cli", "run", str(recipe), "--out", str(tmp_path / "two"))
    assert again.returncode == 0
    assert "distill: cached in" in again.stderr


@pytest.mark.slow
def test_what_fails_is_told_in_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.replace("STRATEGY", "ddp").replace("learning_rate: 1.0e-3", "learning_rate: 1.0, max_length: 3"))
    outcome = launch("-m", "cli", "run", str(recipe), "--out", str(tmp_path / "two"))
    assert outcome.returncode != 0
    assert outcome.stderr.count("unknown key") == 1
    recipe.write_text(RECIPE.replace("STRATEGY", "ddp").replace("layers: 2", "layers: 7"))
    outcome = launch("-m", "cli", "run", str(recipe), "--out", str(tmp_path / "two"))
    assert outcome.stderr.count("stages.distill.student.layers: 7 given") == 1
    assert "internal error" not in outcome.stderr
