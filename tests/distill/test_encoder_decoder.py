"""Students of encoder-decoders: layers of either side, hidden states compared side by side, and answers of the teacher to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from distill.choices import Student
from distill.distill import Distill
from distill.student import build, student_config, take_layers
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.models.checkpoint import load, load_float
from foundation.models.encoder_decoder import answered
from foundation.models.inputs.padding import read_by_decoder
from foundation.training.distillation.capture import Capture, Wanted
from foundation.training.distillation.layer_maps import pairs
from foundation.training.losses.distillation.hidden import Hidden, distance
from foundation.training.losses.distillation.loss import LossInputs, Setting, Shape
from tests.export.generation.tiny_encoder_decoders import CONFIGS, FIRST, PAD, checkpoint, context, preprocessor, sources
from tests.problems import raises_problem
from tests.prune.test_encoder_decoder import features, logits, without_layers

KEY = "stages.distill.student"
LENGTH = 16
PROGRESS = ConsoleProgress("silent")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"layers": 1}, [0, 2]),
        ({"layers": {"decoder": 1}}, [0, 1, 2]),
        ({"layers": {"encoder": 1, "decoder": 2}, "init": "last"}, [1, 3, 4]),
        ({"layers": {"decoder": 2}, "init": {"decoder": "uniform"}}, [0, 1, 2, 4]),
        ({"init": {"encoder": [2], "decoder": [1, 3]}}, [1, 2, 4]),
        ({"init": [1, 2]}, [0, 1, 2, 3]),
        ({}, [0, 1, 2, 3, 4]),
    ],
)
def test_layers_are_chosen_on_either_side(given: dict[str, Any], expected: list[int]) -> None:
    student = Student.model_validate(given)
    assert student.chosen((2, 3), KEY) == expected
    for kind in ("t5", "bart"):
        after = student_config(student, CONFIGS[kind](), KEY)
        assert after.num_hidden_layers == sum(layer < 2 for layer in expected)
        assert (after.num_decoder_layers if kind == "t5" else after.decoder_layers) == sum(layer >= 2 for layer in expected)


@pytest.mark.parametrize(
    ("given", "depths", "message"),
    [
        ({"layers": 3}, (2, 3), r"layers: 3 given; the encoder of the incoming model has 2 layers"),
        ({"layers": {"decoder": 4}}, (2, 3), r"layers: 4 given; the decoder of the incoming model has 3 layers"),
        ({"init": {"decoder": [4]}}, (2, 3), r"init: layer 4 given; the decoder of the incoming model has layers 1 to 3"),
        (
            {"layers": {"decoder": 1}},
            (3,),
            r"layers: given for encoder and decoder; the incoming model has one stack of layers",
        ),
        ({"init": {"decoder": "last"}}, (3,), r"init: given for encoder and decoder; the incoming model has one stack"),
    ],
)
def test_layers_that_are_not_there_are_refused(given: dict[str, Any], depths: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Student.model_validate(given).chosen(depths, KEY)


def test_numbers_and_lists_must_agree_on_a_side() -> None:
    with pytest.raises(ValidationError, match="init lists 2 layers, layers is 1"):
        Student.model_validate({"layers": {"decoder": 1}, "init": {"decoder": [1, 2]}})
    with pytest.raises(ValidationError, match="init lists 2 layers, layers is 1"):
        Student.model_validate({"layers": 1, "init": {"encoder": [1, 2]}})
    with raises_problem("student.ffn", "8", "t5", "cannot be made narrower"):
        student_config(Student(ffn=8), CONFIGS["t5"](), KEY)


@pytest.mark.first(1)
@pytest.mark.parametrize("layers", [[0, 2, 4], [1, 3], [1, 4], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5", "bart", "marian"])
def test_a_student_is_the_teacher_without_the_other_layers(kind: str, layers: list[int]) -> None:
    """Written out: layers are taken out of the list, and the module of T5's relative positions moves to the first that is left."""
    teacher = load_float(checkpoint(kind))
    student: Any = take_layers(teacher, layers, KEY)
    large: Any = load_float(checkpoint(kind))
    without_layers(large, kind, "encoder", [layer for layer in layers if layer < 2])
    without_layers(large, kind, "decoder", [layer - 2 for layer in layers if layer >= 2])
    torch.testing.assert_close(logits(student), logits(large))
    assert student.generation_config.to_dict() == teacher.generation_config.to_dict()  # type: ignore[union-attr,operator]


def test_the_first_token_of_an_answer_stays() -> None:
    student: Any = take_layers(load_float(checkpoint("mbart")), [0, 2], KEY)
    assert student.generation_config.forced_bos_token_id == FIRST


def test_a_table_of_positions_cannot_move_behind_the_first_layer() -> None:
    with pytest.raises(InputError, match=r"layer 1 of the decoder of this t5 .* layer 2 of the decoder"):
        take_layers(load_float(checkpoint("t5")), [0, 1, 3, 2], KEY)


def test_one_side_can_be_new(tmp_path: Path) -> None:
    given = context("bart", tmp_path)
    student = Student.model_validate({"layers": {"decoder": 1}, "init": {"decoder": "random"}})
    made, _ = build(student, checkpoint("bart"), given, KEY)
    old, new = load_float(checkpoint("bart")).state_dict(), made.state_dict()
    assert all(torch.equal(value, old[name]) for name, value in new.items() if ".decoder.layers." not in name)
    matrices = [name for name in new if ".decoder.layers." in name and new[name].ndim == 2]
    assert matrices
    assert not any(torch.equal(new[name], old[name]) for name in matrices)


def test_the_decoder_reads_up_to_the_last_token_that_is_no_padding() -> None:
    ids = torch.tensor([[PAD, 5, PAD, 6, PAD, PAD], [PAD] * 6, [3, PAD, PAD, PAD, PAD, 4]])
    expected = [[1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0], [1] * 6]
    assert read_by_decoder(ids, PAD).int().tolist() == expected


def encoder_decoder_states(model: Any, batch: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Written out with a hook on every block: its outputs, on either side."""
    states: tuple[list[Tensor], list[Tensor]] = ([], [])
    handles = []
    for number, side in enumerate((model.get_encoder(), model.get_decoder())):
        for block in side.block if hasattr(side, "block") else side.layers:
            handles.append(
                block.register_forward_hook(
                    lambda _, args, output, number=number: states[number].append(output[0] if isinstance(output, tuple) else output)
                )
            )
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return states


@pytest.mark.parametrize("layers", ["uniform", "searched"])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_hidden_states_are_compared_on_either_side(kind: str, layers: Any) -> None:
    teacher = load_float(checkpoint(kind))
    student = take_layers(teacher, [1, 2, 4], KEY)
    batch, loss = features(), Hidden(layers=layers)
    setting = Setting(Shape.of(student.config), Shape.of(teacher.config), "text-to-text", "loss")
    assert (setting.student.depths, setting.teacher.depths) == ((1, 2), (2, 3))
    wanted = loss.wants(setting)
    with torch.no_grad():
        captured = [Capture(model, KEY)(batch, one) for model, one in zip((student, teacher), wanted, strict=True)]
    inputs = LossInputs(setting, None, 1.0, *captured, None)  # type: ignore[arg-type]
    found = loss.parts(inputs, torch.nn.Identity())["hidden"]
    mine, theirs = (encoder_decoder_states(model, batch) for model in (student, teacher))
    masks = batch["attention_mask"].bool(), read_by_decoder(batch["decoder_input_ids"], PAD)
    expected = torch.zeros(3)
    for side, depths in enumerate(((1, 2), (2, 3))):
        if layers == "uniform":
            expected += sum(distance(mine[side][m - 1], theirs[side][t - 1], masks[side]) for m, t in pairs("uniform", *depths, ""))
        else:  # every ascending map, the least of each row
            maps = [(0,), (1,)] if side == 0 else [(0, 1), (0, 2), (1, 2)]
            sums = [sum(distance(mine[side][m], theirs[side][t], masks[side]) for m, t in enumerate(chosen)) for chosen in maps]
            expected += torch.stack(sums).min(dim=0).values  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)
    assert (found > 0).all()


def test_a_pruned_student_is_compared_with_the_layers_it_comes_from() -> None:
    from foundation.models.architecture.origin import Origin

    teacher = load_float(checkpoint("t5"))
    origin = Origin.whole(5, 32).after([1, 2, 4], list(range(32)), [None] * 3)
    with torch.no_grad():
        found = Capture(teacher, KEY)(features(), Wanted(hidden=True)).restricted_to(origin)
    whole = encoder_decoder_states(teacher, features())
    assert [len(side.hidden) for side in found.stacks] == [2, 3]
    for side, layers in enumerate(((1,), (0, 2))):
        assert all(torch.equal(one, whole[side][layer]) for one, layer in zip(found.stacks[side].hidden[1:], layers, strict=True))


@pytest.mark.parametrize("loss", ["minilm", "minilmv2", "tinybert", "distilbert"])
def test_losses_for_one_stack_are_refused(loss: str, tmp_path: Path) -> None:
    config = CONFIGS["t5"]()
    given = context("t5", tmp_path)
    with pytest.raises(InputError, match=r"an encoder-decoder has two: give soft_target, or losses"):
        Distill.model_validate({"student": {"layers": 1}, "loss": loss}).check(config, config, given)


@pytest.mark.first(1)
@pytest.mark.whole
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_student_of_fewer_layers_learns_answers_and_hidden_states(kind: str, tmp_path: Path) -> None:
    given = context(kind, tmp_path)
    settings = {
        "student": {"layers": {"encoder": 2, "decoder": 1}},
        "losses": [{"name": "soft_target"}, {"name": "hidden", "weight": 0.1}],
        "sequences": {"beams": 1},
    }
    stage = Distill.model_validate({**settings, "epochs": 2, "batch_size": 8, "learning_rate": 3e-3})
    config = load_float(checkpoint(kind)).config
    stage.check(config, config, given)
    out = tmp_path / "out"
    out.mkdir()
    figures = stage.run(given.teachers[0], given, out)
    losses = figures["losses"]
    assert losses[-1]["soft_target"] < losses[0]["soft_target"]
    assert losses[0]["hidden"] > 0
    student: Any = load(out)
    assert student.config.num_hidden_layers == 2
    assert (student.config.num_decoder_layers if kind == "t5" else student.config.decoder_layers) == 1
    assert len(answered(student, sources((4, 7)), 1, 6)) == 2
    assert preprocessor().max_length
