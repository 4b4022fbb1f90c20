#!/usr/bin/env bash
# pytrec_eval (pytrec-eval-terrier 0.5.11, below ir_measures 0.4.3): documents with different scores are ranked as ties. The guess was that the
# numbers of Python, float64, decide the order, and that nothing changes if one constant is added to all scores.
#
# Seen (2026-11-28): scores become float32 before they are compared, as in trec_eval. What is equal there is ordered by the name of the document, the
# last name first. Times of documents in seconds (1.7e9, where float32 counts in steps of 128) as scores, newest first: a run that is perfect has a
# reciprocal rank of 0.015. A run that puts a second stage before the first by adding 1e9 to its scores has 0.010. Nothing warns. Ranks as scores,
# or the same scores less their minimum, give 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq pytrec-eval-terrier==0.5.11 ir-measures==0.4.3 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import ir_measures
import pytrec_eval
from ir_measures import RR

DOCUMENTS = [f"d{place:03}" for place in range(100)]
# One query whose relevant documents are the newest ones: d000 is the newest, each further one is a second older.
RELEVANCE = {"q": {document: int(place == 0) for place, document in enumerate(DOCUMENTS)}}
TIMES = {document: 1_700_000_000.0 - place for place, document in enumerate(DOCUMENTS)}
SECOND_STAGE = {document: 1e9 + 0.99 - place / 200 for place, document in enumerate(DOCUMENTS)}
RUNS = {
    "times in seconds": TIMES,
    "second stage, 1e9 + score": SECOND_STAGE,
    "times less the oldest": {document: time - min(TIMES.values()) for document, time in TIMES.items()},
    "ranks": {document: 100.0 - place for place, document in enumerate(DOCUMENTS)},
}
print(", ".join(f"{name} {version(name)}" for name in ("pytrec-eval-terrier", "ir-measures")))
for name, scores in RUNS.items():
    assert sorted(scores, key=scores.__getitem__, reverse=True) == DOCUMENTS
    evaluator = pytrec_eval.RelevanceEvaluator(RELEVANCE, {"recip_rank"})
    direct = evaluator.evaluate({"q": scores})["q"]["recip_rank"]
    measured = ir_measures.calc_aggregate([RR], RELEVANCE, {"q": scores})[RR]
    print(f"{name}: reciprocal rank {direct:.3f}, in ir_measures {measured:.3f}")
    assert direct == measured
    large = name.startswith(("times in", "second"))
    assert (direct < 0.05) if large else direct == 1, "the behaviour has changed"
PYTHON
