#!/usr/bin/env bash
# evidently 0.7.23: three of its drift tests overlook, or make up, a drift. The guesses were that the Mann-Whitney test is two-sided, as its docstring
# says, that PSI counts in quantiles of the reference, as the docstring of its bins says, so that one outlier moves one number in 2,000, and
# that a limit of 0.1 for the energy distance does not depend on the unit of the column.
#
# Seen (2026-11-29): method="mannw" tests for values that rose. Scores that fell by a standard deviation have a p-value of 1, risen ones 1e-183. PSI,
# Jensen-Shannon, Kullback-Leibler and Hellinger cut the range of both samples into pieces of equal width: with one number 1,000 times as large
# as the others all else is in one piece, and a shift by a standard deviation has a PSI of 0.0006 where it has 1.09. The default above 1,000 rows,
# a Wasserstein distance in standard deviations of the reference, falls from 1.03 to 0.07, below its limit of 0.1. "ed" has the limit 0.1 in the
# unit of the column: a drift by a standard deviation of 0.001 has 0.02, the same distribution twice, with one of 1,000, has 0.71. Nothing
# warns. "ks" is right in all cases.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile evidently==0.7.23 pandas==2.3.3 numpy==2.4.6 scipy==1.17.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON' 2>"$folder/log" || { cat "$folder/log"; exit 1; }
from importlib.metadata import version

import numpy as np
import pandas as pd
from evidently import Report
from evidently.metrics import ValueDrift

random = np.random.default_rng(0)
before, after = random.standard_normal(2000), random.standard_normal(2000)


def drift(reference, current, method=None):
    frames = [pd.DataFrame({"x": column}) for column in (current, reference)]
    return float(Report([ValueDrift(column="x", method=method)]).run(*frames).dict()["metrics"][0]["value"])


print(f"evidently {version('evidently')}")
p_values = {(method, move): drift(before, after + move, method) for method in ("mannw", "ks") for move in (-1, 0, 1)}
for (method, move), value in p_values.items():
    print(f"{method}, moved by {move} standard deviations: p = {value:.3g}")
assert p_values["mannw", -1] > 0.999 and p_values["mannw", 1] < 1e-100, "the behaviour has changed"
assert max(p_values["ks", -1], p_values["ks", 1]) < 1e-100, "the behaviour has changed"

outlier = np.append(before, 1000.0)
for method in ("psi", "jensenshannon", "kl_div", "hellinger", None):
    plain, one = drift(before, after + 1, method), drift(outlier, after + 1, method)
    print(f"{method or 'the default (Wasserstein)'}, moved by one standard deviation: {plain:.4f}, with one outlier in the reference {one:.4f}")
    assert plain > 0.3 and one < 0.1, "the behaviour has changed"
assert drift(outlier, after + 1, "ks") < 1e-100, "the behaviour has changed"

seconds, milliseconds = drift(before / 1000, (after + 1) / 1000, "ed"), drift(before * 1000, after * 1000, "ed")
print(f"ed: moved by one standard deviation, small unit {seconds:.4f}; the same distribution twice, large unit {milliseconds:.4f}; the limit is 0.1")
assert seconds < 0.1 < milliseconds, "the behaviour has changed"
PYTHON
