#!/usr/bin/env bash
# scalable-vs 0.5.0 (Intel's Scalable Vector Search): LVQ with 8 bits loses vectors whose numbers lie close together, which LVQ with 4 bits finds.
# The guess was that the size of the vectors does not matter, since LVQ scales each vector by its own smallest and largest number, and that 8 bits are
# better than 4.
#
# Seen (2026-12-01): after the mean of all vectors is taken off, the step of a vector is (largest - smallest) / 255. It is kept as a float16, and a
# float16 below 0.000061 (a subnormal number) is read back as 0. So a vector whose range is below 0.0156 becomes one number for all its
# dimensions. For 4 bits the step is 17 times as large, and that happens below 0.0009. Vectors with 1536 dimensions and a length of 1 are right:
# 8 bits find 98 % of the ten nearest. Of the same vectors with a length of 0.05 8 bits find 1 %, 4 + 4 bits and float16 find 99 %. Vectors of length 1 that
# are nearly alike have a small range, too: where the cosine of two vectors is 0.998 on average, as among versions of one text, 8 bits find 1 %.
# LVQ8x8 in a graph (Vamana) finds less than LVQ4x4 then, and scores of LVQ8 by inner product have the wrong size. Nothing warns. All vectors and queries
# multiplied by 100 are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq scalable-vs==0.5.0 numpy==2.4.6 toml==0.10.2
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import numpy as np
import svs

ROWS, QUERIES, SIZE = 1000, 50, 1536
generator = np.random.default_rng(0)
normal = generator.normal(size=(ROWS + QUERIES, SIZE)).astype(np.float32)
unit = normal / np.linalg.norm(normal, axis=1, keepdims=True)
alike = unit[:1] + 0.05 * unit[1:]
alike /= np.linalg.norm(alike, axis=1, keepdims=True)


def nearest(vectors, rows):
    """The ten nearest by squared distance, in float64, and the range of a vector after the mean was taken off."""
    stored, queries = vectors[:rows].astype(np.float64), vectors[rows:].astype(np.float64)
    distances = (stored**2).sum(1) - 2 * queries @ stored.T
    return distances.argsort(1)[:, :10], float(np.ptp(stored - stored.mean(0), axis=1).mean())


def recall(found, right):
    return float(np.mean([len(set(one) & set(other)) / 10 for one, other in zip(found, right, strict=True)]))


def recalls(vectors):
    rows = len(vectors) - QUERIES
    stored, queries = np.ascontiguousarray(vectors[:rows]), np.ascontiguousarray(vectors[rows:])
    svs.write_vecs(stored, "stored.fvecs")
    right, spread = nearest(vectors, rows)
    loader = svs.VectorDataLoader("stored.fvecs", svs.DataType.float32, dims=vectors.shape[1])
    kinds = {
        "float16": svs.Flat(stored.astype(np.float16), svs.L2),
        "LVQ4x4": svs.Flat(svs.LVQLoader(loader, primary=4, residual=4), svs.L2),
        "LVQ8": svs.Flat(svs.LVQLoader(loader, primary=8), svs.L2),
    }
    return {"range": spread} | {name: recall(index.search(queries, 10)[0], right) for name, index in kinds.items()}


def in_graph(vectors, **bits):
    """The same in a graph, with small sizes: whether LVQ in two levels is refined."""
    rows = len(vectors) - QUERIES
    svs.write_vecs(np.ascontiguousarray(vectors[:rows]), "stored.fvecs")
    loader = svs.LVQLoader(svs.VectorDataLoader("stored.fvecs", svs.DataType.float32, dims=vectors.shape[1]), **bits)
    settings = svs.VamanaBuildParameters(graph_max_degree=32, window_size=64, alpha=1.2)
    index = svs.Vamana.build(settings, loader, svs.L2, num_threads=1)
    index.search_window_size = 300
    return recall(index.search(np.ascontiguousarray(vectors[rows:]), 10)[0], nearest(vectors, rows)[0])


print(f"scalable-vs {version('scalable-vs')}")
seen = {}
for name, vectors in (
    ("length 1", unit),
    ("length 0.05", unit * np.float32(0.05)),
    ("length 0.005", unit * np.float32(0.005)),
    ("nearly alike", alike),
    ("nearly alike, times 100", alike * np.float32(100)),
):
    seen[name] = recalls(vectors)
    shares = ", ".join(f"{kind} finds {seen[name][kind]:.0%}" for kind in ("float16", "LVQ4x4", "LVQ8"))
    print(f"{name}: range {seen[name]['range']:.4f}, {shares}")
cosines = alike @ alike.T
print(f"cosine of two that are nearly alike: {(cosines.sum() - len(alike)) / len(alike) / (len(alike) - 1):.4f}")
part = unit[-600:, :768] * np.float32(0.05)
graph = {f"LVQ{bits}x{bits}": in_graph(part, primary=bits, residual=bits) for bits in (8, 4)}
print("in a graph, 768 numbers: " + ", ".join(f"{kind} finds {figure:.0%}" for kind, figure in graph.items()))
changed = "the behaviour has changed"
for name in ("length 1", "nearly alike, times 100"):
    assert min(seen[name]["LVQ8"], seen[name]["LVQ4x4"]) > 0.95, changed
for name in ("length 0.05", "nearly alike"):
    assert seen[name]["range"] < 0.0156 and seen[name]["LVQ8"] < 0.1, changed
    assert seen[name]["LVQ4x4"] > 0.9 and seen[name]["float16"] > 0.95, changed
assert seen["length 0.005"]["LVQ4x4"] < 0.1 and seen["length 0.005"]["float16"] > 0.95, changed
assert graph["LVQ8x8"] < 0.5 and graph["LVQ4x4"] > 0.9, changed
PYTHON
