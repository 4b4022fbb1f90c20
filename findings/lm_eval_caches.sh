#!/usr/bin/env bash
# lm-eval 0.4.13 (LM Evaluation Harness): with use_cache a second model gets the answers of the first one, and with cache_requests a changed task asks
# the old questions.
# The guesses were that a cache of answers knows which model gave them, and that a cache of questions knows the task, its examples and its documents.
#
# Seen (2026-11-30): the key of an answer is the question and its settings. A model that is always wrong has the accuracy of the one that is
# always right, and is not called once, if both are evaluated with one `use_cache`: a compressed model has lost nothing, to the last digit. The
# file of results names the new model. The key of the questions is the name of the task, the number of examples and the name of the tokenizer. With
# another prompt, other documents or another seed of the examples the old questions are sent, and with `samples` all of them: the file of results
# shows the new prompt. Nothing warns. A path for each model, and rewrite_requests_cache=True, are the way out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile torch==2.13.0 lm-eval==0.4.13 transformers==5.23.0 datasets==5.2.0 numpy==2.4.6
cd "$folder"
HF_HOME="$folder/home" HF_HUB_OFFLINE=1 LM_HARNESS_CACHE_PATH="$folder/requests" OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import json
from importlib.metadata import version
from pathlib import Path

import lm_eval
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager


class Model(LM):
    """A stand-in that knows all sums, or gets every sum wrong."""

    def __init__(self, right):
        super().__init__()
        self.right, self.asked = right, []

    def loglikelihood(self, requests):
        answers = []
        for request in requests:
            question, answer = request.args
            first, second = question.split()[-4], question.split()[-2]
            self.asked.append(question)
            answers.append((0.0 if (int(first) + int(second) == int(answer)) == self.right else -9.0, True))
        return answers

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    def generate_until(self, requests):
        raise NotImplementedError


def write(prompt="{{first}} + {{second}} =", start=0, seed=1):
    rows = [{"first": number, "second": number + 1, "answers": [str(2 * number + 1), str(2 * number + 2)]} for number in range(start, start + 20)]
    Path("rows.json").write_text("\n".join(json.dumps(row) for row in rows))
    task = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(Path("rows.json").resolve())}},
        "test_split": "test",
        "fewshot_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": prompt,
        "doc_to_choice": "{{answers}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    Path("tasks").mkdir(exist_ok=True)
    Path("tasks/sums.yaml").write_text(json.dumps(task))


def evaluated(model, examples=0, seed=1234, **settings):
    found = lm_eval.simple_evaluate(
        model, tasks=["sums"], task_manager=TaskManager(include_path="tasks", include_defaults=False), num_fewshot=examples, fewshot_random_seed=seed,
        bootstrap_iters=0, **settings,
    )  # fmt: skip
    return found["results"]["sums"]["acc,none"], found["configs"]["sums"]["doc_to_text"]


print(f"lm-eval {version('lm-eval')}")
changed = "the behaviour has changed"
write()
assert evaluated(Model(True))[0] == 1 and evaluated(Model(False))[0] == 0
first, second = Model(True), Model(False)
scores = [evaluated(model, use_cache="answers")[0] for model in (first, second)]
print(f"use_cache, a model that is right and one that is wrong: accuracies {scores}, calls {[len(model.asked) for model in (first, second)]}")
assert scores == [1, 1] and not second.asked, changed

model = Model(True)
evaluated(model, examples=2, cache_requests=True)
old = set(model.asked)
changes = {
    "another prompt": (dict(prompt="What is {{first}} + {{second}} ="), dict(seed=1234)),
    "other documents": (dict(start=100), dict(seed=1234)),
    "another seed of the examples": ({}, dict(seed=5)),
    "samples 3 and 4 alone": ({}, dict(seed=1234, samples={"sums": [3, 4]})),
}
for name, (task, settings) in changes.items():
    write(**task)
    asked = {}
    for cached in (True, False):
        model = Model(True)
        _, prompt = evaluated(model, examples=2, cache_requests=cached, **settings)
        asked[cached] = set(model.asked)
    print(f"cache_requests, {name}: {len(asked[True] & old)} of {len(old)} questions are the old ones, without the cache {len(asked[False] & old)}; results say {prompt!r}")
    assert asked[True] == old and len(asked[False] & old) < len(old), changed
PYTHON
