"""A language model with a draft that the same recipe distils, end to end: the same answers in fewer steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from compress.pipeline import Outcome, run
from export.choices import Generation
from export.generation.proposals import with_proposals
from export.parity.parity import ParityError
from foundation.artifacts.document import read
from foundation.artifacts.exported import Exported
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.core.target import Target
from foundation.measure import proposals
from foundation.stage.context import Context
from tests import without_clocks
from tests.foundation import tiny_gpt
from tests.test_generation import recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engines_inside")]

STAGES: list[dict[str, Any]] = [
    {"finetune": {"epochs": 2, "learning_rate": 0.01}},
    {"distill": {"id": "draft", "student": {"layers": 1}, "loss": "soft_target", "epochs": 1, "learning_rate": 0.003}},
]
TARGET = {"engines": ["openvino_genai"], "batch_sizes": [1], "sequence_lengths": [8], "threads": 1}


def stages(**proposing: Any) -> list[dict[str, Any]]:
    return [*STAGES, {"export": {"float_precision": "fp32", "generation": {"prompts": 6, "tokens": 7, **proposing}}}]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        without_clocks.hurry(patch)
        patch.setattr(proposals, "STREAMS", (1, 2))
        folder = tmp_path_factory.mktemp("runs") / "tiny"
        asked = stages(draft="draft", draft_tokens=3)
        return run(recipe(target=TARGET, stages=asked), folder, progress=ConsoleProgress("quiet"))


@pytest.mark.whole
def test_a_distilled_draft_speeds_up_the_others_and_changes_no_answer(finished: Outcome) -> None:
    [exported] = finished.folder.glob("stages/export-*")
    builds = json.loads((exported / "export.json").read_text())["builds"]
    told = {build["folder"]: [entry.get("speculation") for entry in build["engines"] if entry["runnable"]] for build in builds}
    assert set(told) >= {"finetune-fp32", "draft-fp32"}
    assert told["draft-fp32"] == [None]  # it proposes nothing to itself
    [found] = told["finetune-fp32"]
    assert (found["draft"], found["tokens"], found["compared"]["identical"]) == ("draft-fp32", 3, 6)
    assert 0 < found["accepted"] < found["proposed"]
    assert found["tokens_per_step"] == pytest.approx(6 * 7 / (6 * 7 - found["accepted"]), abs=1e-4)


@pytest.mark.whole
def test_what_is_accepted_is_what_both_models_would_have_chosen(finished: Outcome) -> None:
    """Counted from the checkpoints in torch, without a cache."""
    import torch
    from transformers import AutoModelForCausalLM

    [exported] = finished.folder.glob("stages/export-*")
    [model, draft] = [
        AutoModelForCausalLM.from_pretrained(next(finished.folder.glob(f"stages/{name}-*"))).eval() for name in ("finetune", "draft")
    ]

    def best(one: Any, text: list[int]) -> int:
        with torch.no_grad():
            return int(one(input_ids=torch.tensor([text])).logits[0, -1].argmax())

    [entry] = next(
        build["engines"] for build in json.loads((exported / "export.json").read_text())["builds"] if build["folder"] == "finetune-fp32"
    )
    proposed = accepted = 0
    for prompt, answer in zip(
        *(load_file(exported / entry["generation"]["file"])[name].tolist() for name in ("prompts", "tokens")), strict=True
    ):
        done = 1
        while done < len(answer):
            text, taken = [*prompt, *answer[:done]], 0
            offered = min(3, len(answer) - done - 1)
            for _ in range(offered):
                if best(draft, text) != answer[done + taken]:
                    break
                text, taken = [*text, answer[done + taken]], taken + 1
            proposed, accepted, done = proposed + offered, accepted + taken, done + taken + 1
        assert best(model, prompt) == answer[0]
    assert (entry["speculation"]["proposed"], entry["speculation"]["accepted"]) == (proposed, accepted)


@pytest.mark.whole
def test_the_report_tells_what_was_accepted_and_what_it_brought(finished: Outcome) -> None:
    report = json.loads((finished.folder / "report.json").read_text())
    answers = {variant["id"]: variant["answers"] for variant in report["variants"]}
    assert {engine["speculation"] for engine in answers["draft"]} == {None}
    engine = next(one for one in answers["finetune"] if one["float_precision"] == "fp32")
    told = engine["speculation"]
    assert [row["streams"] for row in told["speeds"]] == [1, 2]
    for row in told["speeds"]:
        assert (row["n"], row["tokens"]) == (row["streams"] * proposals.TURNS, 7)
        assert 0 <= row["accepted"] <= row["proposed"]
        assert min(row["tokens_per_s"], row["tokens_per_s_alone"], row["peak_memory_bytes"]) > 0
    page = (finished.folder / "report.html").read_text()
    assert "Proposed tokens" in page
    assert "draft-fp32 proposes 3 tokens" in page
    assert re.search(r"\d+ of \d+ \(\d", page)


@pytest.mark.whole
def test_what_the_text_proposes_is_counted_too(finished: Outcome, tmp_path: Path) -> None:
    [exported] = finished.folder.glob("stages/export-*")
    build = read(Exported, exported / "export.json").builds[0]
    entry = build.engines[0].with_(speculation=None)
    context = Context("text-generation", tiny_gpt.data(), tiny_gpt.LENGTH, Target(**TARGET), 0, ConsoleProgress("silent"), tmp_path)
    [found] = with_proposals([build.with_(engines=(entry,))], Generation(prompt_lookup=4), context, exported)
    told = found.engines[0].speculation
    assert told is not None
    assert (told["draft"], told["tokens"], told["compared"]["identical"]) == (None, 4, 6)
    assert entry.generation is not None
    answered = load_file(exported / str(entry.generation.file))
    assert told["proposed"] <= 4 * answered["tokens"].size
    assert with_proposals([build], Generation(), context, exported) == [build]


@pytest.mark.whole
def test_other_answers_are_an_error_where_nothing_rounds(finished: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [exported] = finished.folder.glob("stages/export-*")
    build = read(Exported, exported / "export.json").builds[0]
    context = Context("text-generation", tiny_gpt.data(), tiny_gpt.LENGTH, Target(**TARGET), 0, ConsoleProgress("silent"), tmp_path)
    monkeypatch.setattr("export.generation.proposals.token_shortfall", lambda compared, other: "other answers")
    with pytest.raises(ParityError, match="with prompt look-up: other answers"):
        with_proposals([build], Generation(prompt_lookup=4), context, exported)
    rounded = build.with_(engines=tuple(entry.with_(cache_precision="int8") for entry in build.engines))
    [found] = with_proposals([rounded], Generation(prompt_lookup=4), context, exported)
    assert found.engines[0].speculation is not None
    assert found.engines[0].speculation["tokens"] == 4


@pytest.mark.whole
def test_a_draft_that_cannot_propose_is_one_line(finished: Outcome, tmp_path: Path) -> None:
    [exported] = finished.folder.glob("stages/export-*")
    builds = read(Exported, exported / "export.json").builds
    context = Context("text-generation", tiny_gpt.data(), tiny_gpt.LENGTH, Target(**TARGET), 0, ConsoleProgress("silent"), tmp_path)
    stateful = [build.with_(engines=tuple(entry.with_(mode="stateful") for entry in build.engines)) for build in builds]
    with pytest.raises(InputError, match=r"draft given; .* stateful mode, .* paged mode: give another"):
        with_proposals(stateful, Generation(draft="draft"), context, exported)
    with pytest.raises(InputError, match="draft given; no engine of it answers prompts"):
        with_proposals([build for build in builds if build.variant != "draft"], Generation(draft="draft"), context, exported)


@pytest.mark.parametrize(
    ("proposing", "engines", "line"),
    [
        ({"draft": "drafts"}, ["openvino_genai"], "'drafts' given; finetune or draft is allowed; did you mean 'draft'?"),
        ({"draft": "draft"}, ["onnxruntime"], "no engine takes proposed tokens; put openvino_genai into target.engines"),
        ({"prompt_lookup": 3}, ["onnxruntime"], "prompt_lookup: given, but no engine takes"),
        ({"draft": "draft", "prompt_lookup": 3}, ["openvino_genai"], "draft and prompt_lookup given; one of them proposes"),
        ({"draft_tokens": 3}, ["openvino_genai"], "draft_tokens given without draft"),
        ({"prompt_lookup": 0}, ["openvino_genai"], "greater than or equal to 1"),
        ({"draft": "draft", "draft_tokens": 33}, ["openvino_genai"], "less than or equal to 32"),
    ],
)
def test_what_cannot_propose_is_found_before_anything_runs(proposing: dict[str, Any], engines: list[str], line: str) -> None:
    target = {**TARGET, "engines": engines}
    with pytest.raises(InputError) as caught:
        recipe(target=target, stages=stages(**proposing))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_without_proposals_keeps_its_cache_keys() -> None:
    assert set(Generation().model_dump(mode="json")) == {"kv_cache", "prompts", "tokens"}
    assert Generation(batch_invariant=True).model_dump(mode="json")["batch_invariant"] is True
    assert Generation(draft="draft").model_dump(mode="json")["draft_tokens"] == 4
    assert Generation(prompt_lookup=5).model_dump(mode="json") == {"kv_cache": "float", "prompts": 200, "tokens": 64, "prompt_lookup": 5}
    for one in (Generation(), Generation(draft="draft", draft_tokens=7), Generation(prompt_lookup=5)):
        assert Generation.model_validate(one.model_dump(mode="json")) == one
