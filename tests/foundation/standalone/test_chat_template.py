"""Chat templates are rendered as `apply_chat_template` of Transformers renders them: prompts are equal, and so are refusals."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from foundation.models.inputs.language import of_transformers
from foundation.standalone.chat_template import TemplateRefused, compiled
from foundation.standalone.language_text import LanguageText

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

# Written for this test, each with constructs that templates of a family of models use.
TEMPLATES = {
    "markers": """{% for m in messages %}
{{ '<|begin|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|begin|>assistant\n' }}
{% endif %}
""",
    "default system": """{% if messages[0]['role'] != 'system' -%}
    {{ '[sys]Be kind.[/sys]\n' }}
{%- endif %}
    {% for message in messages %}
        {% if loop.first and message.role == 'system' %}
            {{- '[sys]' ~ message.content | trim ~ '[/sys]\n' -}}
        {% else %}
            {{- '[' ~ message.role | upper ~ ']' ~ message.content ~ eos_token -}}
        {% endif %}
    {% endfor %}""",
    "alternating": """{{ bos_token }}{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles have to take turns: user, assistant, user, ...') }}
{% endif %}
{% if m['role'] == 'user' %}{{ '[ASK] ' + m['content'] | trim + ' [/ASK]' }}{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}
{% endfor %}""",
    "system in first question": """{%- set ns = namespace(system='', first=true) -%}
{%- for m in messages if m.role == 'system' -%}{%- set ns.system = ns.system + m.content + '\n\n' -%}{%- endfor -%}
{{- bos_token -}}
{%- for m in messages | rejectattr('role', 'equalto', 'system') | list -%}
{%- if m.role == 'user' -%}{{- 'Q: ' + (ns.system if ns.first else '') + m.content -}}{%- set ns.first = false -%}
{%- elif m.role == 'assistant' -%}{{- 'A: ' + m.content.split('</think>')[-1].lstrip('\n') + eos_token -}}
{%- else -%}{{- raise_exception('unknown role ' + m.role) -}}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- 'A:' -}}{%- endif -%}""",
    "headers and date": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%Y") %}
    {%- else %}
        {%- set date_string = "2024" %}
    {%- endif %}
{%- endif %}
{{- "<|h|>system<|/h|>\n\nYear: " + date_string + "\n" }}
{%- if tools is not none %}{{- "Tools: " + (tools | tojson) }}{%- endif %}
{%- for message in messages %}
    {{- '<|h|>' + message['role'] + '<|/h|>\n\n'+ message['content'] | trim + '<|e|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|h|>assistant<|/h|>\n\n' }}{%- endif %}""",
    "json": """{% for m in messages %}{{ m | tojson }}
{{ m.content | tojson(indent=2) }}{{ {'b': 1, 'a': [none, true, 1.5, m.content]} | tojson(sort_keys=true, separators=(',', ':')) }}
{% endfor %}{{ tools | tojson }}{{ documents is none }}""",
    "loop controls": """{% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{{ loop.index }}/{{ loop.length }} {{ m.content[:5] }} {{ loop.last }} {{ loop.previtem.role if loop.previtem is defined }}
{% endfor %}""",
    "trained on": """{% set shown = 'outside' %}{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{% set shown = 'inside' %}{{ m.content }}{{ shown }}{{ eos_token }}
{% endgeneration %}{% else %}
{{ m.content }}{% endif %}{{ shown }}{% endfor %}""",
    "macros": """{%- macro block(role, text='') %}<{{ role }}>{{ text | trim | replace('\n', ' ') | title }}</{{ role }}>{% endmacro -%}
{% for m in messages %}{{ block(m.role, m.content) }}{% endfor %}{{ block('end') if not add_generation_prompt else '<a>' }}""",
    "slices and tests": """{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{%- for m in rest[::-1] -%}{{ loop.revindex }}{{ m.content | length }}{{ m.content is string }}{{ m.name is defined }}{{ 'x' in m.content }}
{%- endfor -%}{{ rest | map(attribute='role') | join(',') }}{{ rest | selectattr('role', 'in', ['user']) | list | length }}
{{- (messages | last).content | default('none', true) | e }}{{ range(3) | list }}{{ '%s-%d' | format('a', 3) }}{{ 7 // 2 }}{{ 2 ** 3 }}""",
    "names": """{% set d = dict(a=1) %}{{ d.a }}{{ d['a'] }}{{ dict.fromkeys(['x'], 2) }}{{ d.items() | list }}{{ unk_token }}
{{ pad_token }}{{ missing }}{{ sep_token is defined }}{{ cycler('a', 'b').next() }}{{ joiner(',')() }}""",
    "whitespace": """  {# a comment #}
  {% if true %}
  kept
  {% endif %}
{{ 'a' }}
{{- 'b' -}}

  {%+ if true %} plus{% endif +%}
 end
""",
    "a list is not changed": """{% set x = [1] %}{{ x.append(2) }}{{ x }}""",
    "reaches for Python": """{{ ''.__class__.__mro__ }}{{ messages.__class__ }}x""",
    "underscore": """{% set ns = namespace(_a=1) %}{{ ns._a }}""",
    "too long": """{{ range(10000000) | list | length }}""",
    "undefined": """{{ messages[0].nothing.more }}""",
    "wrong types": """{{ messages[0].content + 1 }}""",
    "divides by zero": """{{ 1 / 0 }}""",
    "not a template": """{% for m in messages %}{{ m.content }}""",
    "unknown tag": """{% frobnicate %}""",
    "unknown filter": """{{ messages | frobnicate }}""",
}
CHATS: dict[str, list[dict[str, str]]] = {
    "question": [{"role": "user", "content": "What is  2 + 2?"}],
    "system": [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "Hi"}],
    "systems": [
        {"role": "system", "content": "One."},
        {"role": "system", "content": "Two."},
        {"role": "user", "content": "x"},
    ],
    "turns": [
        {"role": "user", "content": "<b>\"Gr\u00fc\u00dfe\" & 'x'</b> \u2028\U0001f600"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello </s>"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "{{ bos_token }} {% raw %}"},
        {"role": "user", "content": "  \n five \n\n"},
    ],
    "answer first": [{"role": "assistant", "content": "I begin."}, {"role": "user", "content": "No."}],
    "role": [{"role": "tool", "content": "3"}],
}


def transformers(template: Any, **special: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE({"a": 0}, [], unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **special)


def of_library(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], prompt: bool) -> str | Exception:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:
        return error


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_and_refusals_are_those_of_transformers(name: str) -> None:
    known = transformers(TEMPLATES[name], **SPECIAL)
    ours = of_transformers(known)
    for messages in CHATS.values():
        for prompt in (False, True):
            expected = of_library(known, messages, prompt)
            if isinstance(expected, str):
                assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == expected
                continue
            with pytest.raises(TemplateRefused) as refused:
                ours.apply_chat_template(messages, add_generation_prompt=prompt)
            line = str(refused.value)
            if type(expected) is not jinja2.exceptions.SecurityError:  # their words for it change between versions
                assert " ".join(str(expected).split())[:200] in line
            assert "\n" not in line
            assert (type(expected).__name__ in line) == (type(expected) is not jinja2.TemplateError)


def test_the_templates_above_render_and_are_refused() -> None:
    """Guards the test above: nothing in it compares errors alone, or prompts alone."""
    rendered = {name: [of_library(transformers(one, **SPECIAL), chat, True) for chat in CHATS.values()] for name, one in TEMPLATES.items()}
    never = [name for name, answers in rendered.items() if not any(isinstance(answer, str) for answer in answers)]
    assert 5 <= len(never) <= 10
    assert any(isinstance(answer, Exception) for answer in rendered["alternating"])
    assert str(datetime.now().year) in str(rendered["headers and date"][0])


HERMES = """
{%- if tools %}
    {{- '<|im_start|>system\n<tools>' }}
    {%- for tool in tools %}
        {{- "\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == "tool" %}
        {{- '<tool_response>' + m.content + '</tool_response>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content }}
        {%- for call in m.tool_calls %}
            {{- '\n<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
LLAMA = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
        {{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
        {{- m.tool_calls[0].function.arguments | tojson }}{{- '}' }}
    {%- elif m.role == 'tool' %}
        {{- {"output": m.content} | tojson }}
    {%- else %}
        {{- m.content }}
    {%- endif %}
{%- endfor %}"""
MISTRAL = """{%- if tools is defined and tools is not none %}[AVAILABLE_TOOLS] [
{%- for tool in tools %}{{- '{"type": "function", "function": {' }}
    {%- for key, value in tool.function.items() %}{{- '"' + key + '": ' + (value | tojson) + ', ' }}{%- endfor %}{{- '}}' }}
{%- endfor %}][/AVAILABLE_TOOLS]{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}{{- call.function | tojson }}
        {%- if call.id | length != 9 %}{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
        {%- endfor %}{{- ']' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}"""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "Gr\u00fc\u00dfe <b>"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]


def call(number: int) -> dict[str, Any]:
    return {"id": "a" * number, "type": "function", "function": {"name": "weather", "arguments": {"city": "Troms\u00f8"}}}


CALLED: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "Rain?"}],
    "call": [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call(9)]},
        {"role": "tool", "content": "3", "tool_call_id": "a" * 9, "name": "weather"},
    ],
    "calls": [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "", "tool_calls": [call(8), call(9)]}],
}


@pytest.mark.parametrize("template", [HERMES, LLAMA, MISTRAL])
def test_functions_and_calls_are_written_as_transformers_writes_them(template: str) -> None:
    known = transformers(template)
    ours = of_transformers(known)
    assert ours.takes_tools
    prompts = 0
    for messages in CALLED.values():
        for tools in ([], TOOLS):
            try:
                expected = known.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
            except jinja2.TemplateError as error:
                with pytest.raises(TemplateRefused, match=str(error)):
                    ours.apply_chat_template(messages, tools=tools)
                continue
            prompts += 1
            assert ours.apply_chat_template(messages, tools=tools) == expected
            assert ("weather" in expected) == (bool(tools) or len(messages) > 1)
    assert prompts >= 4


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_know_no_functions_are_seen(name: str) -> None:
    assert of_transformers(transformers(TEMPLATES[name], **SPECIAL)).takes_tools == ("tools" in TEMPLATES[name])


def test_special_tokens_that_a_tokenizer_lacks_are_undefined() -> None:
    template = "{{ bos_token }}|{{ eos_token is defined }}|{{ messages[0].content }}"
    known = transformers(template, eos_token="<end>")
    expected = known.apply_chat_template(CHATS["question"], tokenize=False)
    assert of_transformers(known).apply_chat_template(CHATS["question"]) == expected == "|True|What is  2 + 2?"


def test_of_several_templates_the_default_one_is_taken() -> None:
    known = transformers([{"name": "default", "template": "d{{ messages[0].content }}"}, {"name": "tool_use", "template": "t"}])
    assert of_transformers(known).apply_chat_template(CHATS["system"]) == known.apply_chat_template(CHATS["system"], tokenize=False)
    without = of_transformers(transformers({"rag": "r", "tool_use": "t"}))
    assert not without.has_template
    assert isinstance(of_library(transformers({"rag": "r", "tool_use": "t"}), CHATS["system"], True), ValueError)


def test_a_template_sees_nothing_that_a_request_could_change_for_the_next() -> None:
    render = compiled("{% set _ = messages[0].update({'content': 'other'}) %}{{ messages[0].content }}", {})
    message = {"role": "user", "content": "mine"}
    with pytest.raises(TemplateRefused, match="SecurityError"):
        render([message], True)
    assert message["content"] == "mine"


def test_no_message_and_no_template_are_refused() -> None:
    known = of_transformers(transformers("x"))
    with pytest.raises(TemplateRefused, match="no message"):
        known.apply_chat_template([])
    with pytest.raises(TemplateRefused, match="no chat template"):
        LanguageText(known.tokenizer, type(known.settings)()).apply_chat_template(CHATS["question"])
