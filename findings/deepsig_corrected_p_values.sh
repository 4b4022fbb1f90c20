#!/usr/bin/env bash
# deepsig 1.2.8 (significance tests for comparing models): p-values corrected for several comparisons belong to other hypotheses, and three more of its
# tests do something else than their names say.
# The guesses were that corrected p-values come back in the order of the p-values, that a comparison of two models is the same in aso and in multi_aso, that
# a correction is stricter for more comparisons, and that a paired bootstrap draws pairs.
#
# Seen (2026-11-29): bonferroni_correction sorts and does not sort back, it sorts once more: of p = 0.04, 0.5, 0.001 the second one, which is no
# effect at all, gets 0.003. Two values, or sorted ones, are right. multi_aso of two models, at its defaults, raises the confidence level from 0.95
# to 1: a model that is clearly better has an epsilon of 1, "no order", or NaN, where aso has 0. From two comparisons on the level falls again: 0.975 for
# 2, 0.955 for 10, where Bonferroni has 0.995, so that more models find more differences. bootstrap_test, a "paired bootstrap", draws the scores of both models
# apart: a gain of 0.05 on nearly each of 300 examples has p = 0.26, as in an unpaired test, and 1e-131 in a paired one. Nothing warns of any.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq deepsig==1.2.8 numpy==2.4.6 scipy==1.17.1 statsmodels==0.15.0 pandas==3.1.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from deepsig import aso, bonferroni_correction, bootstrap_test, multi_aso, permutation_test
from scipy.stats import ttest_ind, ttest_rel
from statsmodels.stats.multitest import multipletests

QUIET = {"show_progress": False, "seed": 1, "num_bootstrap_iterations": 200}
print(f"deepsig {version('deepsig')}")
p_values = np.array([0.04, 0.5, 0.001])
found, right = bonferroni_correction(p_values), multipletests(p_values, method="holm")[1]
print(f"p = {p_values.tolist()}: corrected {found.round(4).tolist()}, by Holm in statsmodels {right.round(4).tolist()}")
assert np.allclose(np.sort(found), np.sort(right)), "the behaviour has changed"
assert found.argmin() == 1 and right.argmin() == 2, "the behaviour has changed"
for same in (p_values[:2], np.sort(p_values)):
    assert np.allclose(bonferroni_correction(same), multipletests(same, method="holm")[1])

generator = np.random.default_rng(0)
better, worse = generator.normal(0.9, 0.01, 10), generator.normal(0.5, 0.01, 10)
ahead, behind = generator.normal(0.6, 0.1, 30), generator.normal(0.5, 0.1, 30)
for name, first, second in (("0.9 against 0.5, all apart", better, worse), ("0.6 against 0.5, deviation 0.1", ahead, behind)):
    alone, together = aso(first, second, **QUIET), multi_aso(np.array([first, second]), **QUIET)[0, 1]
    uncorrected = multi_aso(np.array([first, second]), use_bonferroni=False, **QUIET)[0, 1]
    print(f"{name}: epsilon {alone:.3f} in aso, {together:.3f} in multi_aso, {uncorrected:.3f} without its correction")
    assert abs(alone - uncorrected) < 1e-9 and alone < 0.05
    assert np.isnan(together) or together == 1, "the behaviour has changed"

close, epsilons = generator.normal(0.53, 0.1, 30), {}
for comparisons in (1, 2, 10, 45):
    epsilons[comparisons] = float(aso(close, behind, num_comparisons=comparisons, **QUIET))
meant = float(aso(close, behind, confidence_level=1 - 0.05 / 45, **QUIET))
print(f"0.53 against 0.5: epsilon for 1, 2, 10 and 45 comparisons {[round(value, 3) for value in epsilons.values()]}, by Bonferroni for 45 {meant:.3f}")
assert epsilons[2] > epsilons[10] > epsilons[45] > epsilons[1] and meant > epsilons[2], "the behaviour has changed"

scores = generator.standard_normal(300)
lower = scores - 0.05 + generator.normal(0, 0.02, 300)
bootstrap, permutation = (test(scores, lower, num_samples=500, seed=1) for test in (bootstrap_test, permutation_test))
paired, unpaired = (test(scores, lower, alternative="greater").pvalue for test in (ttest_rel, ttest_ind))
print(f"0.05 better on {(scores > lower).mean():.0%} of 300 examples: p = {bootstrap:.3f} by bootstrap_test, {permutation:.3f} by permutation_test; "
      f"t-tests {paired:.0e} paired, {unpaired:.2f} unpaired")
assert bootstrap > 0.1 and permutation < 0.01 and paired < 1e-50 and unpaired > 0.1, "the behaviour has changed"
PYTHON
