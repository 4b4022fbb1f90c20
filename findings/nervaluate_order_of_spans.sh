#!/usr/bin/env bash
# nervaluate 1.2.1: the order in which a model lists its entities decides strict precision and recall, and spans of letters that only touch count as found.
# The guess was that recall cannot fall when an entity is added to a list, and that entities without a letter in common are a miss.
#
# Seen (2026-11-29): predictions are taken one after another, and one that overlaps a true entity uses it up, although a later one is exactly
# right. Models of spans (GLiNER with flat_ner=False, or any that lists nested or competing spans) write such lists. "Ada Lovelace" alone has strict
# recall 1; with "Ada Lovelace and" before it recall is 0, behind it 1. Lists sorted by place, longest span first, are the ones that lose. Tags of tokens
# cannot overlap and are right. And an end counts as inside, where Prodigy, spaCy and GLiNER write the first letter behind: PER 0 to 5 and PER 5
# to 9 overlap by one letter, more than the 1 % that is asked for, so that a model that finds the wrong one of two neighbours has F1 1 for ent_type
# and 0.5 for partial, and with min_overlap_percentage=20 still. Ends less 1 are right. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq nervaluate==1.2.1
"$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from nervaluate.evaluator import Evaluator

Span = tuple[int, int]


def scores(true: list[Span], found: list[Span], overlap: float = 1.0) -> dict[str, tuple[float, float]]:
    """Precision and recall of each scheme; all spans are PER."""
    rows = [[{"label": "PER", "start": start, "end": end} for start, end in spans] for spans in (true, found)]
    evaluator = Evaluator([rows[0]], [rows[1]], tags=["PER"], loader="dict", min_overlap_percentage=overlap)
    return {name: (result.precision, result.recall) for name, result in evaluator.evaluate()["overall"].items()}


print(f"nervaluate {version('nervaluate')}, precision and recall")
name, longer = (0, 11), (0, 15)
cases = (
    ("the entity", [name], 1.0),
    ("the entity, then a longer span", [name, longer], 1.0),
    ("a longer span, then the entity", [longer, name], 0.0),
)
for case, found, recall in cases:
    seen = scores([name], found)
    print(f"{case}: {seen}")
    assert seen["strict"][1] == seen["exact"][1] == recall, "the behaviour has changed"
first, second = (0, 5), (5, 9)
for overlap in (1.0, 20.0, 50.0):
    seen = scores([second], [first], overlap)
    print(f"the neighbour in place of the entity, overlap of {overlap:.0f} %: {seen}")
    assert seen["ent_type"] == ((1.0, 1.0) if overlap < 50 else (0.0, 0.0)), "the behaviour has changed"
    assert seen["partial"] == ((0.5, 0.5) if overlap < 50 else (0.0, 0.0)), "the behaviour has changed"
inside = scores([(5, 8)], [(0, 4)])
print(f"the same with ends less 1: {inside}")
assert inside["ent_type"] == inside["partial"] == (0.0, 0.0)
PYTHON
