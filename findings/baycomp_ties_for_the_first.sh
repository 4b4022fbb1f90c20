#!/usr/bin/env bash
# baycomp 1.0.3: with the default rope=0, two equal models have probabilities of 0.70 and 0.29, and a lead on one of 20 data sets is a certainty of 1.0.
# The guess was 0.5 each for equal models, or all for the middle value, and hardly more than 0.5 if 19 of 20 data sets are tied: the p-value of a sign test is
# 1 there.
#
# Seen (2026-12-01): Posterior.probs counts which of three columns is the largest (np.argmax), and a tie goes to the first column. With rope=0 the middle
# column of two_on_multiple is 0, equal scores count half for each model, and every sample of two equal models is 0.5 and 0.5 up to rounding. So the first
# model wins where rounding does not decide, whichever model is the first. SignTest gives [nan, nan]. With two wins each among 20 data sets it gives 0.8 to the
# first model. A model without a single win has probability 0, since the prior is a tie as well: one lead of 0.0001 among 20 data sets is 1.0 for the other
# model, a lead on the only data set is 1.0, and 3 leads of 3 are 1.0 (sign test: p = 0.25). A rope that is smaller than every difference turns the lead on
# one of 20 into 0.999 for "equal". If both models win on many data sets, the numbers are plausible. Nothing warns of ties but NumPy's 0 / 0 in SignTest.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile baycomp==1.0.3 numpy==2.4.6 scipy==1.17.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import baycomp
import numpy as np
from scipy import stats

changed = "the behaviour has changed"
print(f"baycomp {version('baycomp')}, numpy {np.__version__}")


def signed_ranks(first, second, rope=0.0):
    return np.array(baycomp.two_on_multiple(first, second, rope=rope, random_state=0))


def scores(sets, ups, downs=0, step=0.01):
    """The scores of two models, of which the second leads on `ups` data sets and trails on `downs`."""
    first = np.full(sets, 0.8)
    return first, first + step * np.repeat([1, -1, 0], [ups, downs, sets - ups - downs])


def p_value(first, second):
    wins, losses = int((second > first).sum()), int((second < first).sum())
    return stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0


for sets in (5, 10, 20):
    first, second = scores(sets, 0)
    seen, signs = signed_ranks(first, second), baycomp.SignTest.probs(first, second, random_state=0)
    print(f"equal on {sets} data sets: {seen.round(2)} for the first model, none, the second; SignTest {np.round(signs, 2)}")
    assert seen[0] > 0.6 and seen[1] == 0 and seen[2] < 0.4 and np.isnan(signs).all(), changed

cases = {"one of 20": (20, 1), "one of 20, by 0.0001": (20, 1, 0, 0.0001), "the only data set": (1, 1), "3 of 3": (3, 3)}
for name, case in cases.items():
    first, second = scores(*case)
    seen, swapped, narrow = signed_ranks(first, second), signed_ranks(second, first), signed_ranks(first, second, 0.00001)
    print(f"the second leads on {name}: {seen.round(3)}, swapped {swapped.round(3)}, with a small rope {narrow.round(3)}; "
          f"p of a sign test {p_value(first, second):.2f}")
    assert seen[2] == 1 and swapped[0] == 1 and p_value(first, second) >= 0.25, changed
    assert len(first) < 20 or narrow[1] > 0.99, changed

first, second = scores(20, 2, 2)
both = [np.array(baycomp.SignTest.probs(*pair, random_state=0)) for pair in ((first, second), (second, first))]
print(f"two wins each, 16 ties: SignTest {both[0].round(2)}, swapped {both[1].round(2)}")
assert min(both[0][0], both[1][0]) > 0.7, changed

generator = np.random.default_rng(0)
first = generator.uniform(0.7, 0.9, 20)
second = first + generator.normal(0, 0.01, 20)
seen, swapped = signed_ranks(first, second), signed_ranks(second, first)
print(f"20 different scores: {seen.round(2)}, swapped {swapped.round(2)}; p of Wilcoxon {stats.wilcoxon(first, second).pvalue:.2f}")
assert abs(seen[0] - swapped[2]) < 0.02 and 0.05 < seen[2] < 0.95
PYTHON
