"""Calibration rows that the model writes: whose words they are, how they are sampled, and how they become rows."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer, GenerationConfig

from foundation.artifacts.artifact import Artifact
from foundation.core.errors import InputError
from foundation.models.checkpoint import load_float
from foundation.models.folder import Checkpoint
from foundation.stage.context import Context
from quantize.answers import calibration_rows, prompts_of, written_rows
from quantize.choices import Answers
from quantize.quantize import Quantize
from tests import tiny_language_models as tiny
from tests.export.generation.test_questions import ENDS, chatting
from tests.quantize.test_streaming import both

KEY = "stages.quantize.calibration.answers.questions"


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    return load_float(tiny.write(tmp_path / "model", "llama", torch.float32, num_hidden_layers=2))


def never() -> nn.Module:
    raise AssertionError("the model is not needed")


def blocks(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(3, 60, length).astype(np.int32) for length in lengths]


@torch.inference_mode()
def continued(model: nn.Module, prompt: np.ndarray, tokens: int) -> list[int]:
    """The most likely tokens, each from the whole text."""
    text = prompt.tolist()
    for _ in range(tokens):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text


def test_at_a_low_temperature_rows_are_the_most_likely_continuations(model: nn.Module) -> None:
    prompts = blocks(5, 3, 5, 4)
    rows = written_rows(model, prompts, Answers(tokens=7, temperature=1e-3), 4, 11, seed=1)
    expected = [continued(model, prompts[at], 7) for at in (0, 2, 1, 3)]  # prompts of one length are answered together
    assert np.concatenate(rows).tolist() == [token for text in expected for token in text][:44]
    assert [row.dtype for row in rows] == [np.int32] * 4


def test_tokens_come_as_often_as_the_model_says(model: nn.Module) -> None:
    prompt, count = blocks(6)[0], 3000
    rows = written_rows(model, [prompt] * 16, Answers(tokens=1, temperature=0.7), count, 7, seed=3)
    with torch.inference_mode():
        expected = (model(torch.from_numpy(prompt[None]).long()).logits[0, -1] / 0.7).softmax(dim=-1).numpy()
    drawn = Counter(int(row[-1]) for row in rows)
    found = np.array([drawn[token] for token in range(len(expected))]) / count
    assert all((row[:-1] == prompt).all() for row in rows)
    assert np.abs(found - expected).sum() / 2 < 0.06  # 3,000 draws from this distribution stay below 0.05
    assert np.abs(found - 1 / len(expected)).sum() / 2 > 0.06


def test_prompts_are_asked_again_with_other_answers(model: nn.Module) -> None:
    prompts = blocks(4, 6)
    rows = written_rows(model, prompts, Answers(tokens=10), 5, 24, seed=0)
    text = np.concatenate(rows)
    assert text[:4].tolist() == text[30:34].tolist() == prompts[0].tolist()
    assert text[14:20].tolist() == text[44:50].tolist() == prompts[1].tolist()
    assert text[4:14].tolist() != text[34:44].tolist()


def test_the_seed_decides_and_nothing_else_is_drawn_from(model: nn.Module) -> None:
    model.train()
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again, other = (written_rows(model, blocks(4), Answers(), 2, 40, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_answers_to_questions_end(tmp_path: Path) -> None:
    folder = chatting("gpt2", tmp_path / "model")
    (tmp_path / "q.txt").write_text("bcd\ncab\ndd\n")
    answers = Answers(questions=str(tmp_path / "q.txt"), tokens=12)
    prompts = prompts_of(answers, [], folder, 40, KEY)
    template = AutoTokenizer.from_pretrained(folder)
    asked = {
        tuple(template.apply_chat_template([{"role": "user", "content": line}], add_generation_prompt=True, return_dict=False))
        for line in ("bcd", "cab", "dd")
    }
    assert {tuple(prompt.tolist()) for prompt in prompts} == asked
    ends = set(GenerationConfig.from_pretrained(folder).eos_token_id)
    assert ends == set(ENDS)
    text = np.concatenate(written_rows(load_float(folder), prompts, answers, 30, 20, seed=0)).tolist()
    places = [at for at, token in enumerate(text[:-8]) if token in ends]
    assert len(places) > 5
    for at in places:
        assert any(tuple(text[at + 1 : at + 1 + len(prompt)]) in asked for prompt in prompts)


def test_the_order_of_the_questions_does_not_matter(tmp_path: Path) -> None:
    folder = chatting("gpt2", tmp_path / "model")
    found = []
    for name, lines in (("a", ["bcd", "cab", "dd", "abc"]), ("b", ["abc", "dd", "cab", "bcd"])):
        (tmp_path / name).write_text("\n".join(lines))
        found.append([ids.tolist() for ids in prompts_of(Answers(questions=str(tmp_path / name)), [], folder, 40, KEY)])
    assert found[0] == found[1]


def test_train_rows_come_first_and_their_beginnings_are_continued(tmp_path: Path, blocks_context: Context) -> None:
    folder = tiny.write(tmp_path / "model", "llama", torch.float32, num_hidden_layers=1)
    stage = Quantize(calibration={"rows": 8, "answers": {"share": 0.25, "prompt": 0.5, "tokens": tiny.LENGTH // 2}})
    read = blocks_context.data.calibration(8, 0).rows
    rows = calibration_rows(stage, folder, lambda: load_float(folder), blocks_context)
    assert len(rows) == len(read) == 8
    for row, other in zip(rows[:6], read[:6], strict=True):
        assert np.array_equal(row, other)
    half = tiny.LENGTH // 2
    beginnings = {row[:half].tobytes() for row in read}
    assert all(row[:half].tobytes() in beginnings and row[half:].tobytes() not in {r[half:].tobytes() for r in read} for row in rows[6:])


def test_without_answers_the_model_is_not_loaded(tmp_path: Path, blocks_context: Context) -> None:
    rows = calibration_rows(Quantize(calibration={"rows": 3}), tmp_path, never, blocks_context)
    assert np.array_equal(rows, blocks_context.data.calibration(3, 0).rows)


@pytest.mark.first(1)
@pytest.mark.whole
@pytest.mark.parametrize("settings", [{}, {"rotation": "hadamard"}])
def test_streamed_and_in_memory_the_model_writes_the_same(settings: dict[str, Any], tmp_path: Path, blocks_context: Context) -> None:
    """Also a rotated one: it is asked before it is rotated."""
    folder = tiny.write(tmp_path / "model", "llama", torch.float32, num_hidden_layers=2)
    given = {"scheme": "w4a16", "group_size": 16, "calibration": {"rows": 16, "answers": {"share": 1.0}}, **settings}
    (whole, _), (streamed, _) = both(folder, blocks_context, **given)
    for name, scale in load_file(whole / "quantization.safetensors").items():
        torch.testing.assert_close(load_file(streamed / "quantization.safetensors")[name], scale, rtol=1e-5, atol=0)


@pytest.mark.whole
def test_other_answers_give_other_ranges(tmp_path: Path, blocks_context: Context) -> None:
    folder = tiny.write(tmp_path / "model", "llama", torch.float32, num_hidden_layers=2)
    found = []
    for answers in (None, {"share": 1.0}):
        out = tmp_path / f"out{len(found)}"
        out.mkdir()
        Quantize(scheme="w8a8", calibration={"rows": 16, "answers": answers}).run(Artifact(folder, {}), blocks_context, out)
        found.append(load_file(out / "quantization.safetensors"))
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_cannot_be_asked_is_refused(tmp_path: Path, blocks_context: Context) -> None:
    folder = chatting("gpt2", tmp_path / "model")
    config = Checkpoint(folder).config
    (tmp_path / "q.txt").write_text("bcd\n")
    stage = Quantize(calibration={"answers": {"questions": str(tmp_path / "q.txt"), "tokens": 4096}})
    with pytest.raises(InputError, match=rf"{KEY}: .* has \d+ tokens, and an answer \d+"):
        prompts_of(stage.calibration.answers or Answers(), [], folder, 40, KEY)
    with pytest.raises(InputError, match=r"stages.quantize.stream: true"):
        Quantize(stream=True, calibration={"answers": {}}).check(config, None, blocks_context)
    with pytest.raises(InputError, match=rf"{KEY}: .*absent.txt"):
        Quantize(calibration={"answers": {"questions": str(tmp_path / "absent.txt")}}).check(config, None, blocks_context)


def test_only_a_language_model_writes(bert: Artifact, context: Context) -> None:
    stage = Quantize(calibration={"answers": {}})
    with pytest.raises(InputError, match=r"calibration.answers: given for text-classification"):
        stage.check(Checkpoint(bert.path).config, None, context)


def test_other_questions_make_a_stage_run_anew(tmp_path: Path, blocks_context: Context) -> None:
    depends = []
    for text in ("bcd", "bcd\ncab"):
        (tmp_path / "q.txt").write_text(text)
        depends.append(Quantize(calibration={"answers": {"questions": str(tmp_path / "q.txt")}}).depends(blocks_context))
    shutil.rmtree(tmp_path)
    assert depends[0] != depends[1]
    assert depends[0] != Quantize().depends(blocks_context)
