#!/usr/bin/env bash
# treelite 4.8.1, LightGBM 4.7.0: zero_as_missing of LightGBM is lost, so that rows with zeros take other branches.
# The guess was that it is carried out, as DART, forests, categories, NaN and use_missing=False are, or refused, as linear trees are.
#
# Seen (2026-11-30): LightGBM sends zeros and NaN to the default side of a split; treelite compares a zero with the threshold and sends
# NaN alone there. Sparse tables (counts of words, one-hot columns), for which the setting is made, get other predictions: off by up to
# 1.5 standard deviations of the target where two of five numbers are 0, in 86 % of the rows; rows without a zero are right. Nothing
# warns. DART, forests, categories and all other objectives that were tried agree to six digits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq treelite==4.8.1 lightgbm==4.7.0 numpy==2.4.6
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import lightgbm
import numpy as np
import treelite

print(f"treelite {version('treelite')}, lightgbm {version('lightgbm')}")
generator = np.random.default_rng(0)
dense = generator.normal(size=(1000, 6)).astype(np.float32)
sparse = np.where(generator.random(dense.shape) < 0.4, 0, dense).astype(np.float32)
with_nan = np.where(generator.random(dense.shape) < 0.4, np.nan, dense).astype(np.float32)
target = dense[:, 0] * dense[:, 1] + np.sin(dense[:, 2])
for name, rows, settings in (
    ("zeros, plain", sparse, {}),
    ("NaN, plain", with_nan, {}),
    ("NaN, use_missing=False", with_nan, {"use_missing": False}),
    ("zeros, DART", sparse, {"boosting": "dart"}),
    ("zeros, zero_as_missing", sparse, {"zero_as_missing": True}),
):
    booster = lightgbm.train({"verbose": -1, "min_data_in_leaf": 5, "num_threads": 1, **settings}, lightgbm.Dataset(rows, target), 20)
    right = booster.predict(rows)
    off = np.abs(treelite.gtil.predict(treelite.frontend.from_lightgbm(booster), rows).ravel() - right) / target.std()
    full = (rows != 0).all(axis=1)
    print(f"{name}: off by {off.max():.2g} standard deviations, {(off > 1e-5).mean():.0%} of the rows; rows without a zero by {off[full].max():.2g}")
    assert off[full].max() < 1e-5
    assert (off.max() > 0.3) == ("zero_as_missing" in name) and ("zero_as_missing" in name or off.max() < 1e-5), "the behaviour has changed"
PYTHON
