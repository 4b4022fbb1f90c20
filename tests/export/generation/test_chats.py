"""Chat templates and questions are checked at `compress plan`: prompts that part from Transformers stop a run before it trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from compress.commands.plan import describe
from compress.recipe import Recipe, check
from foundation.core.errors import InputError
from foundation.standalone import chat_template
from tests.foundation import tiny_gpt

pytestmark = pytest.mark.whole

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
TOOLS = "{{ raise_exception('Give tools.') }}"
MAPS = "{{ messages[0] | tojson }}"


def recipe(tmp_path: Path, template: str | None, question: str | None = None, **export: Any) -> Recipe:
    folder = Path(shutil.copytree(tiny_gpt.checkpoint(), tmp_path / "model"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if question is not None:
        (tmp_path / "q.txt").write_text(f"{question}\n")
        export = {"generation": {"questions": str(tmp_path / "q.txt"), "tokens": 4}}
    settings = {
        "name": "chats",
        "model": {"path": str(folder), "task": "text-generation"},
        "data": {"path": str(tiny_gpt.data_folder()), "max_length": tiny_gpt.LENGTH},
        "stages": [{"finetune": {"epochs": 1}}, {"export": export}],
        "target": {"sequence_lengths": [tiny_gpt.LENGTH]},
    }
    return check(settings)


@pytest.mark.parametrize("template", [None, PLAIN, MAPS])
def test_a_plan_says_nothing_of_prompts_that_equal_those_of_transformers(template: str | None, tmp_path: Path) -> None:
    assert "chat template" not in describe(recipe(tmp_path, template), tmp_path / "run")


def test_a_plan_refuses_a_template_that_is_rendered_to_other_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_to_json", lambda value: json.dumps(value, ensure_ascii=True, indent=4))
    given = recipe(tmp_path, MAPS)
    with pytest.raises(InputError) as caught:
        describe(given, tmp_path / "run")
    (problem,) = caught.value.problems
    assert problem.key == "chat template of the model"
    assert "in Transformers" in str(problem.given)
    assert "chat_template.jinja" in str(problem.remedy)


def test_a_plan_names_special_tokens_that_only_transformers_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = recipe(tmp_path, PLAIN)
    monkeypatch.setattr("export.generation.chats.language_text", _without_names)
    with pytest.raises(InputError, match="chat template of the model"):
        describe(given, tmp_path / "run")


def _without_names(folder: Path) -> Any:
    from dataclasses import replace

    from foundation.models.inputs.language import language_text
    from foundation.standalone.language_text import LanguageText

    text = language_text(folder)
    return LanguageText(text.tokenizer, replace(text.settings, special_tokens={}))


def test_a_template_that_takes_no_question_is_noted(tmp_path: Path) -> None:
    (line,) = [line for line in describe(recipe(tmp_path, TOOLS), tmp_path / "run").splitlines() if "chat template" in line]
    assert "Give tools." in line


@pytest.mark.parametrize(("template", "part"), [(TOOLS, "Give tools."), (PLAIN, "the model reads 16")])
def test_a_plan_refuses_questions_that_cannot_be_asked(template: str, part: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        describe(recipe(tmp_path, template, "What does the old king see in the grey water under his ship?"), tmp_path / "run")
    assert any(part in line for line in caught.value.lines)
