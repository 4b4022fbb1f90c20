"""`compress generate`: what answers, what it says, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from cli import app
from compress.commands.generate import Choice, chosen, side_by_side
from compress.commands.verify import verify
from compress.pipeline import run
from export.engines.spec import EngineSpec
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.measure import generation
from foundation.models.checkpoint import load
from tests import without_clocks
from tests.foundation import tiny_gpt
from tests.test_generation import recipe

pytestmark = pytest.mark.usefixtures("engines_inside")

TOKENS = 6
STREAMS = generation.STREAMS


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = {"engines": ["openvino_genai"], "batch_sizes": [1], "sequence_lengths": [8], "threads": 1}
    stages = [
        {"finetune": {"epochs": 0.5, "learning_rate": 0.01}},
        {"quantize": {"calibration": {"rows": 64}}},
        {"export": {"float_precision": "fp32", "generation": {"prompts": 4, "tokens": 4}}},
    ]
    with pytest.MonkeyPatch.context() as patch:
        without_clocks.hurry(patch)
        patch.setattr(generation, "STREAMS", STREAMS)  # the report tells the speed of each number
        folder = tmp_path_factory.mktemp("runs") / "tiny"
        return run(recipe(target=target, stages=stages), folder, progress=ConsoleProgress("quiet")).folder


def generate(folder: Path, *arguments: str, lines: str = "") -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["generate", str(folder), "--max-tokens", str(TOKENS), *arguments], input=lines)
    return result.exit_code, result.stdout, result.stderr


def in_torch(folder: Path, variant: str, prompt: str) -> str:
    """Returns the greedy answer of a checkpoint, without a cache."""
    [checkpoint] = folder.glob(f"stages/{variant}-*")
    tokens = tokens_in_torch(folder, variant, prompt)
    text: str = AutoTokenizer.from_pretrained(checkpoint).decode(tokens, skip_special_tokens=True)
    return text


def tokens_in_torch(folder: Path, variant: str, prompt: str) -> list[int]:
    """Returns its token ids."""
    [checkpoint] = folder.glob(f"stages/{variant}-*")
    model: Any = load(checkpoint) if variant == "quantize" else AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    start = ids.shape[1]
    with torch.no_grad():
        for _ in range(TOKENS):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(dim=-1)], dim=1)
    tokens: list[int] = ids[0, start:].tolist()
    return tokens


@pytest.mark.whole
@pytest.mark.parametrize(
    ("arguments", "variant", "title"),
    [
        ((), "quantize", "quantize (int8, rest fp32, OpenVINO GenAI paged)"),
        (("--variant", "finetune"), "finetune", "finetune (fp32, OpenVINO GenAI paged)"),
        pytest.param(("--variant", "finetune-fp32", "--engine", "torch"), "finetune", "finetune (fp32, torch)", marks=pytest.mark.slow),
        (("--engine", "torch"), "quantize", "quantize (int8, rest fp32, torch)"),
    ],
)
def test_an_answer_is_that_of_the_checkpoint(finished: Path, arguments: tuple[str, ...], variant: str, title: str) -> None:
    status, out, err = generate(finished, "--prompt", "The old", *arguments)
    assert status == 0, err
    assert out == in_torch(finished, variant, "The old") + "\n"
    assert title in err
    assert f"{TOKENS} out; first after " in err


@pytest.mark.whole
@pytest.mark.parametrize(
    ("arguments", "title"),
    [
        pytest.param(("--draft", "finetune"), "paged, draft finetune fp32)", marks=pytest.mark.slow),
        (("--draft", "finetune-fp32", "--draft-tokens", "2"), "paged, draft finetune fp32)"),
        (("--draft", "RUN"), "paged, draft quantize int8)"),
        (("--prompt-lookup", "3"), "paged, looking the prompt up)"),
    ],
)
def test_what_is_proposed_changes_no_answer(finished: Path, arguments: tuple[str, ...], title: str) -> None:
    prompt = "the the the the"
    status, out, err = generate(finished, "--prompt", prompt, *(str(finished) if one == "RUN" else one for one in arguments))
    assert status == 0, err
    assert out == in_torch(finished, "quantize", prompt) + "\n"
    assert title in err
    accepted, proposed, rate = map(float, re.findall(r"; (\d+) of (\d+) proposed tokens accepted, ([\d.]+) tokens per step", err)[0])
    assert 0 <= accepted <= proposed
    assert rate == pytest.approx(TOKENS / (TOKENS - accepted), abs=0.005)
    if "RUN" in arguments:  # the model proposes to itself: all is taken, in the first step nothing is proposed
        assert accepted == proposed == 4


@pytest.mark.whole
def test_a_draft_with_other_tokens_is_refused(finished: Path) -> None:
    [checkpoint] = finished.glob("stages/finetune-*")
    words = checkpoint / "tokenizer.json"
    before = words.read_text()
    changed = json.loads(before)
    vocabulary = changed["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    try:
        words.write_text(json.dumps(changed))
        with pytest.MonkeyPatch.context() as patch:  # the file is part of the artifact, whose hashes are another test's subject
            patch.setattr(
                "compress.commands.generate.opened", __import__("foundation.artifacts.run_folder", fromlist=["open_run"]).open_run
            )
            status, _, err = generate(finished, "--prompt", "a", "--draft", "finetune")
    finally:
        words.write_text(before)
    assert status == 2
    assert "--draft finetune: 2 tokens with other ids, such as " in err
    assert "give a draft with the same tokenizer" in err


@pytest.mark.whole
def test_prompts_come_line_by_line_from_standard_input(finished: Path) -> None:
    status, out, _ = generate(finished, lines="The old\n\nThere\n")
    assert status == 0
    assert out == "".join(in_torch(finished, "quantize", prompt) + "\n" for prompt in ("The old", "There"))


@pytest.mark.whole
@pytest.mark.parametrize("other", [pytest.param("finetune", marks=pytest.mark.slow), "finetune-fp32", "torch"])
def test_two_answers_stand_side_by_side(finished: Path, other: str) -> None:
    status, out, err = generate(finished, "--prompt", "The old", "--compare", other)
    assert status == 0, err
    heading = out.splitlines()[0]
    assert heading.startswith("quantize (int8")
    assert ("finetune" in heading) == (other != "torch")
    assert "tokens are equal" in err


@pytest.mark.whole
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompt", ""), "--prompt: no token in it"),
        (("--prompt", "a " * 30), "the model reads 16 in all: give fewer"),
        (("--prompt", "a", "--variant", "quantise"), "--variant quantise: no such variant; finetune"),
        (("--prompt", "a", "--compare", "other"), "--compare other: no such variant"),
        (("--prompt", "a", "--engine", "openvino"), "--engine openvino: nothing of this run answers in it"),
        (("--prompt", "a", "--temperature", "-1"), "temperature: -1 given; 0 to 100 is allowed"),
        (("--prompt", "a", "--beams", "2", "--temperature", "1"), "beams do not sample"),
        (("--prompt", "a", "--stop", ""), "stop: an empty text given"),
        (("--prompt", "a", "--stop-token", "-1"), "stop_tokens: -1 given; give ids of the vocabulary, from 0 on"),
        (("--prompt", "a", "--stop-token", "300"), "--stop-token 300: no such token; 0 to 299 is allowed"),
        (("--prompt", "a", "--answers", "2"), "answers: 2 given with 1 beam; give at least as many beams"),
        (("--prompt", "a", "--length-penalty", "2"), "length_penalty: 2 given with 1 beam; only a search uses it: give 2 beams or more"),
        (("--prompt", "a", "--draft", "finetun"), "--draft finetun: no variant and no folder of a run; finetune"),
        (("--prompt", "a", "--draft", "/"), "/: not a finished run"),
        (("--prompt", "a", "--draft", "finetune", "--engine", "torch"), "tokens can be proposed in openvino_genai: give --engine"),
        (("--prompt", "a", "--draft", "finetune", "--beams", "2"), "beams: 2 given with a draft"),
        (("--prompt", "a", "--draft", "finetune", "--temperature", "1"), "temperature: 1 given with a draft"),
        (("--prompt", "a", "--draft", "finetune", "--draft-tokens", "0"), "0 tokens at once given; 1 to 32 is allowed"),
        (("--prompt", "a", "--draft", "finetune", "--prompt-lookup", "3"), "--draft, --prompt-lookup: both given"),
        (("--prompt", "a", "--prompt-lookup", "33"), "33 tokens at once given; 1 to 32 is allowed"),
    ],
)
def test_wrong_input_is_one_line(finished: Path, arguments: tuple[str, ...], words: str) -> None:
    status, out, err = generate(finished, *arguments)
    assert status == 2
    assert out == ""
    assert words in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.whole
def test_a_seed_and_a_search_give_the_same_answer_again(finished: Path) -> None:
    drawn = [generate(finished, "--prompt", "The", "--temperature", "2", "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    searched = generate(finished, "--prompt", "The", "--beams", "3")
    assert searched[0] == 0
    assert searched[1] == generate(finished, "--prompt", "The", "--beams", "3", "--engine", "torch")[1]


@pytest.mark.first(1)
@pytest.mark.whole
@pytest.mark.parametrize("engine", ["openvino_genai", "torch"])
def test_a_search_shows_its_best_answers(finished: Path, engine: str) -> None:
    """The higher the power of the length, the longer the answers."""
    [checkpoint] = finished.glob("stages/quantize-*")
    model: Any = load(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = torch.tensor([tokenizer("The")["input_ids"]])
    end = tokens_in_torch(finished, "quantize", "The")[2]
    shown = []
    for penalty in ("0", "3"):
        settings = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": float(penalty), "eos_token_id": end, "pad_token_id": 0}
        found = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, **settings)[:, ids.shape[1] :].tolist()
        best = [row[: row.index(end) + 1] if end in row else row for row in found]
        told = ("--beams", "4", "--answers", "3", "--length-penalty", penalty, "--stop-token", str(end), "--engine", engine)
        status, out, err = generate(finished, "--prompt", "The", *told)
        assert status == 0, err
        shown.append(out)
        if engine == "torch" or penalty == "0":  # above 1 OpenVINO GenAI may end a search sooner
            assert out == "\n---\n".join(tokenizer.decode(row, skip_special_tokens=True) for row in best) + "\n"
            assert f", {' and '.join(str(len(row)) for row in best)} out" in err
    assert shown[0] != shown[1]


@pytest.mark.whole
def test_a_second_search_stands_beside_with_all_its_answers(finished: Path) -> None:
    told = ("--prompt", "The", "--beams", "3", "--answers", "3")
    status, out, err = generate(finished, *told, "--compare", "torch")
    assert status == 0, err
    lines = out.splitlines()
    assert [line[:38].strip() for line in lines].count("---") == [line[42:].strip() for line in lines].count("---") == 2


@pytest.mark.whole
@pytest.mark.parametrize("engine", ["openvino_genai", "torch"])
def test_a_stop_token_ends_an_answer(finished: Path, engine: str) -> None:
    [checkpoint] = finished.glob("stages/quantize-*")
    whole = tokens_in_torch(finished, "quantize", "The old")
    end = whole[2]
    status, out, err = generate(finished, "--prompt", "The old", "--engine", engine, "--stop-token", "0", "--stop-token", str(end))
    assert status == 0, err
    kept = whole[: whole.index(end) + 1]
    assert out == AutoTokenizer.from_pretrained(checkpoint).decode(kept, skip_special_tokens=True) + "\n"
    assert f"{len(kept)} out" in err


@pytest.mark.whole
@pytest.mark.parametrize("engine", ["openvino_genai", "torch"])
def test_a_stop_text_ends_an_answer_at_its_letter(finished: Path, engine: str) -> None:
    whole = in_torch(finished, "quantize", "The old")
    begins = len(whole) // 2
    stop = whole[begins : begins + 2]
    status, out, err = generate(finished, "--prompt", "The old", "--engine", engine, "--stop", stop, "--stop", "never there")
    assert status == 0, err
    assert out == whole[: whole.index(stop)] + "\n"


@pytest.mark.slow
@pytest.mark.whole
def test_the_chat_template_of_the_tokenizer_is_used(finished: Path) -> None:
    [checkpoint] = finished.glob("stages/quantize-*")
    settings = checkpoint / "tokenizer_config.json"
    before = settings.read_text()
    template = "{% for message in messages %}There was {{ message['content'] }}{% endfor %}"
    try:
        settings.write_text(json.dumps({**json.loads(before), "chat_template": template}))
        with pytest.MonkeyPatch.context() as patch:  # the file is part of the artifact, whose hashes are another test's subject
            patch.setattr(
                "compress.commands.generate.opened", __import__("foundation.artifacts.run_folder", fromlist=["open_run"]).open_run
            )
            assert generate(finished, "--prompt", " gold")[1] == in_torch(finished, "quantize", "There was gold") + "\n"
            assert generate(finished, "--prompt", " gold", "--no-chat")[1] == in_torch(finished, "quantize", " gold") + "\n"
    finally:
        settings.write_text(before)


def test_a_run_without_answers_is_refused(tmp_path: Path) -> None:
    status, _, err = generate(tmp_path, "--prompt", "a")
    assert status == 2
    assert "not a finished run" in err


def test_the_last_variant_in_the_first_engine_answers() -> None:
    def choice(variant: str, engine: str, precision: str = "fp32") -> Choice:
        spec = EngineSpec("openvino_genai", "paged", precision, "fp32", "cpu", 1, "", "")
        return Choice(variant, precision, engine, tiny_gpt.data_folder(), spec)

    known = [
        choice("baseline", "openvino_genai"),
        choice("quantize", "openvino_genai", "int8"),
        choice("quantize", "openvino_genai", "w4a16"),
        choice("baseline", "torch"),
    ]
    assert chosen(known, None, None) is known[1]
    assert chosen(known, "quantize-w4a16", None) is known[2]
    assert chosen(known, None, "torch") is known[3]
    with pytest.raises(InputError, match="--variant quantize --engine torch: this variant was not built for this engine"):
        chosen(known, "quantize", "torch")


def test_columns_are_wrapped_and_of_equal_height() -> None:
    lines = side_by_side(["left", "right"], ["one two three four", "one"], ["12 tokens", "3 tokens"], 9)
    assert lines == [
        "left         right",
        "---------    ---------",
        "one two      one",
        "three        ---------",
        "four         3 tokens",
        "---------",
        "12 tokens",
    ]


@pytest.mark.whole
def test_the_report_tells_how_well_and_how_fast_it_answers(finished: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    answers = [engine for variant in report["variants"] for engine in variant["answers"]]
    assert [(engine["precision"], engine["float_precision"]) for engine in answers][-1] == ("int8", "fp32")
    for engine in answers:
        assert engine["agreement"]["baseline"]["prompts"] == 4
        assert {(row["prompt_tokens"], row["streams"]) for row in engine["speeds"]} == {(9, streams) for streams in (1, 4, 8)}
        assert all(row["tokens_per_s"] > 0 and row["weight_bytes"] > 0 for row in engine["speeds"])
    assert report["bandwidth_bytes_per_s"] > 0
    assert verify(finished, log=lambda line: None) == []
    page = (finished / "report.html").read_text()
    assert "Tokens of the baseline" in page
    assert "Prompts of 9 tokens" in page
