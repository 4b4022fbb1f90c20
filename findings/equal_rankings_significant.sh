#!/usr/bin/env bash
# MLstatkit 0.1.91 and mlxtend 0.25.0 (tests for comparing two models): two models that are equal differ with p = 0, and a p-value depends on which model
# comes first.
# The guesses were p = 1 for a model and itself, as its difference is 0, and the same p-value for "a and b" and for "b and a".
#
# Seen (2026-12-01): for two models that rank all examples alike, MLstatkit's Delong_test ("a two-sided p-value is reported") finds no variance, and draws
# samples instead. It doubles the share of differences above 0, which is 0, though all of them are 0: z = 0 and p = 0. So a model differs from itself, from its
# own probabilities after calibration or with a temperature, and from a quantized model with the same order. mlxtend's mcnemar with its default
# corrected=True has (inf, 0.0) for two models that are right and wrong on the same examples: it subtracts 1 from a difference of 0 and divides by 0. With
# exact=True it is 1. mlxtend's proportion_difference returns the lower tail as "the p-value": 0.8 and 0.9 of 100 have 0.023, the same two in the other order
# have 0.977, and equal ones 0.5. Two-sided that is 0.046, 0.046 and 1. Whoever names the better model first never finds a difference, and whoever names it
# second finds one at half of the p-value. The docstring does not say so, and nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile MLstatkit==0.1.91 mlxtend==0.25.0 numpy==2.4.6 scipy==1.17.1 scikit-learn==1.9.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from MLstatkit import Delong_test
from mlxtend.evaluate import mcnemar, mcnemar_table, proportion_difference
from scipy.stats import binomtest, norm, permutation_test
from sklearn.metrics import roc_auc_score

changed = "the behaviour has changed"
print(f"MLstatkit {version('MLstatkit')}, mlxtend {version('mlxtend')}, scipy {version('scipy')}")
random = np.random.default_rng(0)
labels = random.integers(0, 2, 200)
logits = random.normal(1.5 * labels - 0.75, 1.0)
others = {
    "itself": logits,
    "its probabilities": 1 / (1 + np.exp(-logits)),
    "a temperature of 2": 1 / (1 + np.exp(-logits / 2)),
    "another model": logits + random.normal(0, 1.0, 200),
}
for name, scores in others.items():
    z, p = Delong_test(labels, logits, scores, return_ci=False, return_auc=False, n_boot=500, random_state=0)
    one, two = roc_auc_score(labels, logits), roc_auc_score(labels, scores)
    print(f"DeLong's test of a model and {name}: areas {one:.4f} and {two:.4f}, z = {z:.3f}, p = {p:.4f}")
    if name == "another model":
        [back] = Delong_test(labels, scores, logits, return_ci=False, return_auc=False)[1:]
        assert 0 < p < 1 and abs(back - p) < 1e-12
    else:
        assert one == two and z == 0
        assert p == 0, changed

answers = np.where(random.random(200) < 0.85, labels, 1 - labels)
worse = np.where(random.random(200) < 0.8, labels, 1 - labels)
for name, second in (("themselves", answers), ("others", worse)):
    table = mcnemar_table(labels, answers, second)
    disagree = int(table[0, 1]), int(table[1, 0])
    right = binomtest(disagree[0], sum(disagree)).pvalue if sum(disagree) else 1.0
    chi2, p = mcnemar(table)
    exact = mcnemar(table, exact=True)[1]
    print(f"McNemar's test of answers and {name}: disagreements {disagree}, chi2 = {chi2:.3f}, p = {p:.4f}; exact {exact:.4f}, SciPy {right:.4f}")
    assert abs(exact - right) < 1e-9
    assert (p == 0 and chi2 == np.inf) if second is answers else abs(p - right) < 0.05, changed

for one, two, rows in ((0.8, 0.9, 100), (0.9, 0.8, 100), (0.9, 0.9, 100)):
    z, p = proportion_difference(one, two, rows)
    both = 2 * norm.sf(abs(z))
    samples = [np.repeat([1, 0], [round(share * rows), round((1 - share) * rows)]) for share in (one, two)]
    drawn = permutation_test(
        samples, lambda a, b, axis: a.mean(axis) - b.mean(axis), vectorized=True, n_resamples=5000, rng=np.random.default_rng(0)
    ).pvalue
    print(f"{one} and {two} of {rows}: z = {z:.3f}, p = {p:.4f}; two-sided {both:.4f}, by permutation {drawn:.4f}")
    assert abs(drawn - both) < 0.05
    assert abs(p - norm.cdf(z)) < 1e-9 and abs(p - both) > 0.02, changed
PYTHON
