#!/usr/bin/env bash
# @huggingface/jinja 0.5.11 (npm; it renders the chat templates of Transformers.js) against Transformers 5.23.0: the same template gives another prompt.
# The guess was that what the port renders is what Transformers renders, and that what it cannot render is refused, as format, dict and chained
# comparisons are.
#
# Seen (2026-11-30): True is written "true", None is nothing at all and a dict or a list comes out as JSON, where Python writes 'None' and single quotes.
# So an assistant's message with content None, as calls of tools have it, and a template with {{ tool }} give other tokens. == is that of
# JavaScript: [] == [] and two equal dicts are unequal, "1" and 1 are equal. A template that asks for `tools == []` lists tools that are
# none. -7 % 3 is -1 and not 2, -2.7 | int is -3, title writes "It'S", capitalize leaves the other letters as they are, and the length of a text counts
# letters outside of the first 65,536 twice. Nothing warns. tojson, loops, namespaces, slices, macros, trim and tests for none agree. The port minijinja
# 3.1.0 (in Rust, by its package for Python) had the first of these until this summer (mitsuhiko/minijinja#913) and has the rest right; its tojson writes
# "<b>" as "\u003cb\u003e", as Jinja2 itself does and Transformers does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile transformers==5.23.0 jinja2==3.1.6 minijinja==3.1.0 numpy==2.4.6
npm install --silent --no-fund --no-audit --prefix "$folder" @huggingface/jinja@0.5.11
cat >"$folder/render.mjs" <<'JAVASCRIPT'
import { readFileSync } from "node:fs";
import { Template } from "@huggingface/jinja";

const { templates, messages } = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(templates.map((template) => new Template(template).render({ messages }))));
JAVASCRIPT
FOLDER=$folder "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import json
import os
import subprocess
from importlib.metadata import version

import minijinja
from transformers.utils.chat_template_utils import render_jinja_template

MESSAGES = [
    {"role": "user", "content": "Is <b> bold? 😀", "flag": True, "count": "1", "tools": []},
    {"role": "assistant", "content": None, "tools": [{"name": "look_up", "exact": False}]},
]
differ = {
    "content None": "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}",
    "a dict": "{{ messages[1].tools[0] }}",
    "a boolean": "{{ messages[0].flag }}",
    "tools == []": "{% if messages[0].tools == [] %}no tools{% else %}Tools: {{ messages[0].tools | length }}{% endif %}",
    "two equal dicts": "{{ 'same' if messages[1].tools[0] == {'name': 'look_up', 'exact': false} else 'other' }}",
    "a text and a number": "{{ 'same' if messages[0].count == 1 else 'other' }}",
    "-7 % 3": "{{ (0 - 7) % 3 }}",
    "-2.7 | int": "{{ -2.7 | int }}",
    "title": "{{ \"it's late\" | title }}",
    "capitalize": "{{ 'HELLO world' | capitalize }}",
    "length": "{{ messages[0].content | length }}",
}
agree = {
    "tojson": "{{ messages[1].tools | tojson }} {{ messages[1].tools | tojson(indent=2) }}",
    "loop": "{% for m in messages %}{{ loop.index }}{{ ',' if not loop.last }}{% endfor %}",
    "namespace": "{% set n = namespace(x=1) %}{% for i in range(3) %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}",
    "slice": "{{ messages[0].content[1:4] }}{{ messages[-1].role }}",
    "macro": "{% macro say(a, b='x') %}{{ a }}-{{ b }}{% endmacro %}{{ say(1) }}",
    "trim": "{{ '  a ' | trim }}|{{ messages[0].content.split(' ')[0] }}",
    "is none": "{{ 'none' if messages[1].content is none else 'some' }}",
    "7 // 2": "{{ 7 // 2 }} {{ 7 / 2 }} {{ (0 - 7) // 2 }}",
}
templates = differ | agree
sent = json.dumps({"templates": list(templates.values()), "messages": MESSAGES})
node = subprocess.run(["node", f"{os.environ['FOLDER']}/render.mjs"], input=sent, capture_output=True, text=True, check=True)
environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True)
environment.auto_escape_callback = lambda name: False
print(f"transformers {version('transformers')}, @huggingface/jinja 0.5.11, minijinja {version('minijinja')}")
changed = "the behaviour has changed"
for (name, template), in_javascript in zip(templates.items(), json.loads(node.stdout), strict=True):
    [[in_python]] = [render_jinja_template([MESSAGES], chat_template=template)[0]]
    in_rust = environment.render_str(template, messages=MESSAGES)
    print(f"{name}: {in_python!r}" + (f" in Transformers, {in_javascript!r} in JavaScript" if in_javascript != in_python else ""))
    assert (in_javascript != in_python) == (name in differ) and in_rust == in_python, changed
escaped = environment.render_str("{{ messages[0].content | tojson }}", messages=MESSAGES)
[[plain]] = [render_jinja_template([MESSAGES], chat_template="{{ messages[0].content | tojson }}")[0]]
print(f"tojson: {plain} in Transformers, {escaped} in minijinja")
assert "<b>" in plain and "\\u003cb\\u003e" in escaped, changed
PYTHON
