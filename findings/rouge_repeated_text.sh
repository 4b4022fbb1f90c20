#!/usr/bin/env bash
# rouge 1.0.1: a text that repeats itself twenty times has the score of the text. The guess was that precision falls with every repetition, since a word
# of the answer matches a word of the reference once: that is how ROUGE counts, and rouge-score 0.1.2 after it.
#
# Seen (2026-11-29): words and pairs of words are counted as a set (`exclusive=True`, the default of get_scores), and the length of the longest common
# subsequence is divided by the number of different words. A model that falls into a loop, as small and strongly quantized language models do, loses nothing:
# the reference twenty times over has ROUGE-1 1.00, ROUGE-2 0.95 and ROUGE-L 1.00, where rouge-score has 0.10 for all three. Of a model whose
# every second answer loops the mean ROUGE-L is that of the model without loops. Rouge(exclusive=False) agrees with rouge-score. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq rouge==1.0.1 rouge-score==0.1.2 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer

NAMES = {"rouge-1": "rouge1", "rouge-2": "rouge2", "rouge-l": "rougeL"}
reference = "the president signed a new climate law in paris on friday"
loop = " ".join([reference] * 20)
print(f"rouge {version('rouge')}, rouge-score {version('rouge-score')}; the reference twenty times over:")
exact, default, counted = (RougeScorer(list(NAMES.values())).score(reference, loop), *(Rouge(exclusive=flag).get_scores(loop, reference)[0] for flag in (True, False)))
for name, other in NAMES.items():
    print(f"{name}: {default[name]['f']:.3f} by default, {counted[name]['f']:.3f} with exclusive=False, rouge-score {exact[other].fmeasure:.3f}")
    assert default[name]["f"] > 0.95 and abs(counted[name]["f"] - exact[other].fmeasure) < 1e-3 and exact[other].fmeasure < 0.11, "the behaviour has changed"
references = [f"{reference} and {number} others were there" for number in ("two", "ten", "six", "nine")]
sound, broken = references, [text if place % 2 else " ".join([text] * 20) for place, text in enumerate(references)]
means = [Rouge().get_scores(texts, references, avg=True)["rouge-l"]["f"] for texts in (sound, broken)]
print(f"mean ROUGE-L: {means[0]:.3f} without loops, {means[1]:.3f} with a loop in every second answer")
assert min(means) > 0.99, "the behaviour has changed"
PYTHON
