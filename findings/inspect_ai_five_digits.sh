#!/usr/bin/env bash
# inspect-ai 0.3.285: match(numeric=True) counts wrong numbers as right. The guess was that two numbers match where they are equal, however they
# are written.
#
# Seen (2026-11-28): both numbers are rounded to five significant digits before they are compared. 123456 and 123458 are the same answer, and
# 0.999996 is 1. Of products of two numbers of four digits that are wrong by 1 to 100 nine in ten count as right. Nothing warns, and the docstring
# names other steps. location="exact" and "any" do the same; with numeric=False the texts are compared whole.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq inspect-ai==0.3.285
INSPECT_LOG_LEVEL=error "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import random
import sys
from importlib.metadata import version

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import match


def accuracy(pairs, location="end"):
    """Share of answers that count as right. The model is a stand-in that gives the answers in turn."""
    answers = [ModelOutput.from_content("mockllm/model", answer) for answer, _ in pairs]
    for answer in answers:
        answer.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    task = Task([Sample("How many?", target=target) for _, target in pairs], scorer=match(location, numeric=True))
    model = get_model("mockllm/model", custom_outputs=answers, memoize=False)
    [log] = eval(task, model, display="none", log_dir=sys.argv[1], max_samples=1)
    assert log.status == "success", log.error
    return log.results.scores[0].metrics["accuracy"].value


print(f"inspect-ai {version('inspect-ai')}")
cases = (
    ("123456", "123456", 1),
    ("12346", "12345", 0),
    ("123458", "123456", 1),
    ("The answer is 1,234,549.", "1234500", 1),
    ("0.999996", "1", 1),
    ("123471", "123456", 0),
)
for answer, target, expected in cases:
    for location in ("end", "any") + (("exact",) if answer[0] != "T" else ()):
        seen = accuracy([(answer, target)], location)
        print(f"answer {answer!r}, target {target!r}, {location}: {seen}")
        assert seen == expected, "the behaviour has changed"

generator = random.Random(0)
products = [generator.randrange(5000, 10000) * generator.randrange(5000, 10000) for _ in range(200)]
seen = accuracy([(str(product + generator.randint(1, 100)), str(product)) for product in products])
print(f"200 products of two numbers of four digits, all answers wrong by 1 to 100: {seen:.1%} count as right")
assert seen > 0.85, "the behaviour has changed"
PYTHON
