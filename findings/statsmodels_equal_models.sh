#!/usr/bin/env bash
# statsmodels 0.15.0: McNemar's test finds two models with equal answers different with p = 0 where exact=False, and one NaN among p-values makes
# all corrected ones NaN while some of them are rejected.
# The guess was p = 1 or NaN for a table without a change; and that a NaN is left out or raises.
#
# Seen (2026-11-29): mcnemar([[90, 0], [0, 20]], exact=False) has the statistic inf and p = 0.0, as the continuity correction squares -1 before it
# divides by 0 changes; without the correction p is NaN, with exact=True 1. With one change or two it is as it should be. multipletests of 0.001,
# 0.01, NaN, 0.04 and 0.2: bonferroni, holm and sidak count the NaN as a test and correct the other four; fdr_bh and fdr_tsbh give five NaN, and
# reject the first two, and with the fourth three.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq statsmodels==0.15.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import numpy as np
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

print(f"statsmodels {version('statsmodels')}")
for table, expected in (([[90, 0], [0, 20]], 0.0), ([[90, 1], [0, 20]], 1.0), ([[90, 1], [1, 20]], 0.4795)):
    approximate, exact = mcnemar(np.array(table), exact=False), mcnemar(np.array(table), exact=True)
    plain = mcnemar(np.array(table), exact=False, correction=False)
    print(f"{table}: p = {approximate.pvalue:.4f}, exact {exact.pvalue:.4f}, without correction {plain.pvalue:.4f}")
    assert abs(approximate.pvalue - expected) < 1e-4 and exact.pvalue == 1.0, "the behaviour has changed"
    assert np.isnan(plain.pvalue) == (expected == 0.0), "the behaviour has changed"

given = np.array([0.001, 0.01, np.nan, 0.04, 0.2])
for method, numbers, rejected in (("bonferroni", 4, 2), ("holm", 4, 2), ("sidak", 4, 2), ("fdr_bh", 0, 2), ("fdr_tsbh", 0, 3)):
    rejects, corrected = multipletests(given, method=method)[:2]
    print(f"{method}: rejects {rejects.tolist()}, corrected {corrected.round(4).tolist()}")
    assert int(np.isfinite(corrected).sum()) == numbers and int(rejects.sum()) == rejected, "the behaviour has changed"
PYTHON
