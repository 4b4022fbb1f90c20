#!/usr/bin/env bash
# lighteval 0.13.0: four of its corpus metrics measure something else than their names say. The guesses were that chrF and TER see every translation,
# as BLEU in the same list does, that the F1 of a task with two classes is the F1 of one of them, whatever the answers are, that micro F1 of three
# classes is their accuracy, as it is where every row has one class, and that the DROP metric is a mean over the questions.
#
# Seen (2026-11-29): the references of chrF, chrF++ and TER are handed over row by row where sacrebleu takes columns. It then scores the first
# translation alone, against the first reference of every row: 1 right one and 99 wrong ones have 100 points, 99 right ones behind 1 wrong one have 10.
# All of WMT is listed with BLEU, chrF and TER. loglikelihood_f1 (MRPC and QQP) is the larger one of the F1 of both classes, so that a model
# that always says no has 0.77 where it finds no paraphrase. multi_f1_numeric (CommitmentBank) counts the classes a row does not have: one
# constant answer has 0.56 for an accuracy of a third. Metrics.drop is the best question's score. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq lighteval==0.13.0 sacrebleu==2.6.0 scikit-learn==1.9.1 transformers==5.23.0 torch==2.13.0 numpy==2.4.6
HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import warnings
from importlib.metadata import version

import sacrebleu
from sklearn.metrics import f1_score

from lighteval.metrics.metrics import Metrics
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.requests import Doc

warnings.filterwarnings("ignore")


def corpus(name, docs, responses):
    """What a task reports for one metric: a value of each row, then the aggregation over the rows."""
    metric = getattr(Metrics, name).value
    step = metric.sample_level_fn
    rows = [getattr(step, "prepare", None) or step.compute for _ in docs]
    rows = [prepare(doc=doc, model_response=response) for prepare, doc, response in zip(rows, docs, responses, strict=True)]
    values = metric.get_corpus_aggregations()
    if isinstance(rows[0], dict):
        return {key: float(values[key]([row[key] for row in rows])) for key in rows[0]}
    return float(values[metric.metric_name](rows))


print(f"lighteval {version('lighteval')}, sacrebleu {version('sacrebleu')}")
references = [f"train number {row} leaves for the north at {row % 12 + 1} in the morning" for row in range(100)]
docs = [Doc(query="", choices=[text], gold_index=0) for text in references]
first = references[:1] + ["nothing of the kind"] * 99
others = ["nothing of the kind"] + references[1:]
seen, right = {}, {}
for name, scorer in (("chrf", sacrebleu.CHRF()), ("chrf_plus", sacrebleu.CHRF(word_order=2)), ("ter", sacrebleu.TER())):
    for said, texts in (("1 of 100", first), ("99 of 100", others)):
        seen[name, said] = corpus(name, docs, [ModelResponse(text=[text]) for text in texts])
        right[name, said] = scorer.corpus_score(texts, [references]).score
        print(f"{name}, {said} translations right: {seen[name, said]:.1f}, sacrebleu {right[name, said]:.1f}")
    better = 0 if name == "ter" else 100
    assert abs(seen[name, "1 of 100"] - better) < 1e-6 and abs(seen[name, "99 of 100"] - better) > 80, "the behaviour has changed"
    assert abs(right[name, "99 of 100"] - better) < 5 and abs(right[name, "1 of 100"] - better) > 80, "the behaviour has changed"


def choices(labels, answers, classes):
    docs = [Doc(query="", choices=[str(one) for one in range(classes)], gold_index=label) for label in labels]
    return docs, [ModelResponse(text=[], logprobs=[0.0 if one == answer else -9.0 for one in range(classes)]) for answer in answers]


labels = [0] * 625 + [1] * 375
constant = corpus("loglikelihood_f1", *choices(labels, [0] * 1000, 2))
print(f"loglikelihood_f1 of a model that always says class 0: {constant:.3f}; F1 of class 1 {f1_score(labels, [0] * 1000, zero_division=0):.3f}")
assert abs(constant - 1250 / 1625) < 1e-9, "the behaviour has changed"
labels = [0, 1, 2] * 100
micro = corpus("multi_f1_numeric", *choices(labels, [0] * 300, 3))
print(f"multi_f1_numeric of one constant answer: {micro:.3f}; micro F1 in scikit-learn {f1_score(labels, [0] * 300, average='micro'):.3f}")
assert abs(micro - 5 / 9) < 1e-9, "the behaviour has changed"
docs = [Doc(query="", choices=[text], gold_index=0, specific={"golds_no_preprocessing": [text]}) for text in references]
drop = corpus("drop", docs, [ModelResponse(text=[text]) for text in first])
print("drop, 1 of 100 answers right:", drop)
assert drop == {"em": 1.0, "f1": 1.0}, "the behaviour has changed"
PYTHON
