#!/usr/bin/env bash
# scikit-posthocs 0.17.1: posthoc_tukey_hsd compares other rows than those of the groups where the labels of the rows repeat.
# The guess was that the labels of the rows (the index of pandas) mean nothing, as in its other comparisons: the groups are in a column of their own.
#
# Seen (2026-12-01): the rows of a group are looked up by their labels, so that a group gets the rows of every other group that has the same label. pd.concat of
# one table for each model, as scores are usually put together, numbers the rows of each table from 0. With as many rows for each model all groups are then the
# same numbers: three models whose means are ten standard errors apart have p = 1 for every pair, where scipy.stats.tukey_hsd and posthoc_tukey have
# 0.000. With groups of 7, 15 and 10 rows the p-values are larger too. After reset_index(drop=True), or with pd.concat(..., ignore_index=True), they are
# right. Nothing warns. The other comparisons of the package give the same numbers for both tables.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile scikit-posthocs==0.17.1 numpy==2.4.6 pandas==3.1.1 scipy==1.17.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import numpy as np
import pandas as pd
import scikit_posthocs as posthocs
from scipy.stats import tukey_hsd

OTHERS = ("tukey", "dunn", "conover", "nemenyi", "ttest", "mannwhitney", "scheffe", "tamhane", "dscf", "vanwaerden")
changed = "the behaviour has changed"
print(f"scikit-posthocs {version('scikit-posthocs')}, pandas {pd.__version__}")
random = np.random.default_rng(0)
for name, sizes, step in (("20 scores each", (20, 20, 20), 0.04), ("7, 15 and 10 scores", (7, 15, 10), 0.02)):
    scores = [random.normal(0.8 + step * place, 0.02, size) for place, size in enumerate(sizes)]
    tables = [pd.DataFrame({"score": values, "model": model}) for model, values in zip("abc", scores, strict=True)]
    repeated, numbered = pd.concat(tables), pd.concat(tables, ignore_index=True)
    right = tukey_hsd(*scores).pvalue
    found = {}
    for rows, table in (("repeated", repeated), ("numbered", numbered)):
        found[rows] = posthocs.posthoc_tukey_hsd(table, val_col="score", group_col="model").to_numpy()
        print(f"{name}, labels of the rows {rows}: p of a-b, a-c, b-c {found[rows][np.triu_indices(3, 1)].round(4).tolist()}", end="; ")
        print(f"scipy {right[np.triu_indices(3, 1)].round(4).tolist()}")
    assert np.allclose(found["numbered"], right, atol=1e-6)
    assert found["repeated"][0, 2] > 0.5 and right[0, 2] < 0.05, changed
    assert sizes[0] != sizes[1] or found["repeated"].min() > 0.999, changed
    for other in OTHERS:
        function = getattr(posthocs, f"posthoc_{other}")
        one, two = (function(table, val_col="score", group_col="model").to_numpy() for table in (repeated, numbered))
        assert np.allclose(one, two)
PYTHON
