#!/usr/bin/env bash
# lleaves 1.3.0 (compiles LightGBM models by LLVM), LightGBM 4.7.0: a random forest of three or more classes answers class 0, and linear trees lose their
# slopes.
# The guess was that forests are right, as they were added on purpose (siboehm/lleaves#59), and that what cannot be compiled is refused, as one-versus-all is.
#
# Seen (2026-11-30): the average over the trees is taken for class 0 alone, by the number of all trees of all classes. The scores of the other classes
# stay sums. Where no class is likely these are far below 0, and class 0 wins with a probability of 1: of three classes with an accuracy of
# 0.56 in LightGBM 0.44 is left, of ten 0.21 become 0.12, and most labels change. Trees with linear_tree=True keep the constants of their leaves,
# which is off by a quarter of the spread of the predictions. Nothing warns. Boosted classes, two classes and regression by a forest, DART, reg_sqrt, `sigmoid`,
# zero_as_missing and NaN agree to six digits. Newer llvmlite than 0.43 has no PassManagerBuilder, and lleaves raises.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile lightgbm==4.7.0 lleaves==1.3.0 llvmlite==0.43.0 numpy==2.4.6 scipy==1.17.1
FOLDER=$folder OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
import os
from importlib.metadata import version

import lightgbm
import lleaves
import numpy as np

PATH = os.environ["FOLDER"] + "/model.txt"
random = np.random.default_rng(0)
rows = random.standard_normal((3000, 5))
score = rows[:, 0] + random.standard_normal(3000)
FOREST = {"boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.6}


def both(target, features=rows, **settings):
    """Predictions of 1,000 rows that were not trained on, by LightGBM and by what lleaves compiled of its file."""
    data = lightgbm.Dataset(features[:2000], target[:2000])
    model = lightgbm.train({"verbose": -1, "num_threads": 1, "num_leaves": 15, **settings}, data, 20)
    model.save_model(PATH)
    compiled = lleaves.Model(PATH)
    compiled.compile()
    return model.predict(features[2000:]), compiled.predict(features[2000:], n_jobs=1)


def classes(number):
    return np.searchsorted(np.quantile(score, np.arange(1, number) / number), score)


print(f"lleaves {version('lleaves')}, lightgbm {version('lightgbm')}, llvmlite {version('llvmlite')}")
changed = "the behaviour has changed"
for number in (3, 10):
    true = classes(number)[2000:]
    right, seen = both(classes(number), objective="multiclass", num_class=number, **FOREST)
    accuracies = [float((scores.argmax(axis=1) == true).mean()) for scores in (right, seen)]
    moved, first = (right.argmax(axis=1) != seen.argmax(axis=1)).mean(), (seen.argmax(axis=1) == 0).mean()
    print(f"forest of {number} classes: accuracy {accuracies[0]:.3f}, compiled {accuracies[1]:.3f}, {moved:.0%} of the labels change, {first:.0%} are class 0")
    assert moved > 0.4 and first > 0.7 and accuracies[1] < accuracies[0] - 0.05, changed
right, seen = both(2 * rows[:, 0] + rows[:, 1], objective="regression", linear_tree=True)
off = float(np.abs(right - seen).mean() / right.std())
print(f"linear trees: off by {off:.0%} of the spread on average")
assert off > 0.1, changed
holes = np.where(random.random(rows.shape) < 0.3, 0, rows)
holes[random.random(rows.shape) < 0.2] = np.nan
sound = {
    "boosted, three classes": both(classes(3), objective="multiclass", num_class=3),
    "forest, two classes": both(classes(2), objective="binary", **FOREST),
    "forest, regression": both(score, objective="regression", **FOREST),
    "DART": both(score, objective="regression", boosting="dart"),
    "reg_sqrt": both(200 * score, objective="regression", reg_sqrt=True),
    "sigmoid": both(classes(2), objective="binary", sigmoid=2.5),
    "zero_as_missing": both(score, holes, objective="regression", zero_as_missing=True),
    "NaN": both(score, holes, objective="regression"),
}
for name, (right, seen) in sound.items():
    largest = float(np.abs(right - seen).max() / np.abs(right).max())
    print(f"{name}: off by {largest:.0e}")
    assert largest < 1e-6
try:
    both(classes(3), objective="multiclassova", num_class=3)
except ValueError as refusal:
    print(f"one-versus-all: {refusal}")
else:
    raise AssertionError(changed)
PYTHON
