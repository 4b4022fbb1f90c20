#!/usr/bin/env bash
# NumKong 7.8.6 and SimSIMD 6.5.16 (distances of vectors), a CPU with AVX-512: distributions that have nothing in common have a Jensen-Shannon distance of 0.
# The guess was the number of scipy.spatial.distance.jensenshannon, which NumKong's type stub names as its model: the root of log(2), 0.8326, where no class
# has a probability in both.
#
# Seen (2026-12-01): the kernels for AVX-512 add up a class only where both probabilities are above a small number. A class that one of the two does not have
# is left out, though it is the one that counts most: its share is p log(2). Of two answers, each of three classes out of 1,000 and no class in common,
# the distance is 0, as of two equal ones. A label (one class with probability 1) and a uniform answer over 20 classes are at 0.5132, where they are at
# 0.7698. So a model that is wrong everywhere looks perfect: labels, the top answers of a teacher and histograms of drift have zeros.
# In NumKong float16, float32 and float64 are wrong, in SimSIMD float32. SimSIMD's float64 is a tenth too large, with zeros and without: 0.9129, more than
# the largest distance that there is. Other distributions without zeros are right, and so is NumKong after disable_capability("skylake"), that is on a CPU
# without AVX-512. Besides, its cast to float8 E4M3 turns NaN into 448, the largest number. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq numkong==7.8.6 simsimd==6.5.16 numpy==2.4.6 scipy==1.17.1
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import numkong
import numpy as np
import simsimd
from scipy.spatial.distance import jensenshannon

if not numkong.get_capabilities()["skylake"]:
    sys.exit("this CPU has no AVX-512: the kernels in question do not run here")
CLASSES = 1000
generator = np.random.default_rng(0)


def few(first):
    """Three classes with probabilities, out of 1,000."""
    p = np.zeros(CLASSES)
    p[first : first + 3] = [0.7, 0.2, 0.1]
    return p


def naive(p, q):
    middle = (p + q) / 2
    terms = [(x * np.log(x / m)).sum() for x, m in ((p[p > 0], middle[p > 0]), (q[q > 0], middle[q > 0]))]
    return float(np.sqrt(sum(terms) / 2))


pairs = {
    "no class in common": (few(10), few(500)),
    "one class, and 20 alike": (np.eye(20)[3], np.full(20, 0.05)),
    "the same": (few(10), few(10)),
    "no zeros": (generator.dirichlet(np.ones(CLASSES)), generator.dirichlet(np.ones(CLASSES))),
}
print(*(f"{name} {version(name)}" for name in ("numkong", "simsimd", "scipy")))


def distances(package, name, kind):
    p, q = (x.astype(kind) for x in pairs[name])
    return float(package.jensenshannon(p, q))


seen = {}
for name, (p, q) in pairs.items():
    assert abs(naive(p, q) - jensenshannon(p, q)) < 1e-6
    for kind in ("float16", "float32", "float64"):
        seen[name, kind] = distances(numkong, name, kind), distances(simsimd, name, kind), naive(p, q)
        print(f"{name}, {kind}: numkong {seen[name, kind][0]:.4f}, simsimd {seen[name, kind][1]:.4f}, scipy {seen[name, kind][2]:.4f}")
lost = np.array(numkong.astype(numkong.astype(np.array([np.nan, 1.0], np.float32), "float8_e4m3"), "float32"))
print(f"NaN and 1 in float8 E4M3: {lost.tolist()}")
for capability in [name for name, has in numkong.get_capabilities().items() if has and name not in ("serial", "haswell")]:
    numkong.disable_capability(capability)
changed = "the behaviour has changed"
for (name, kind), (kong, simd, right) in seen.items():
    without = distances(numkong, name, kind)
    print(f"{name}, {kind}: numkong without AVX-512 {without:.4f}")
    assert abs(without - right) < 2e-3, changed
    if kind == "float64":
        assert simd >= 1.08 * right, changed
    if name in ("the same", "no zeros"):
        assert abs(kong - right) < 2e-3 and (kind == "float64" or abs(simd - right) < 5e-3), changed
    else:
        assert right - kong > 0.2 and (kind != "float32" or right - simd > 0.2), changed
        assert (name != "no class in common" or kong < 1e-3) and (kind != "float16" or abs(simd - right) < 2e-3), changed
assert lost[0] == 448 and lost[1] == 1, changed
PYTHON
