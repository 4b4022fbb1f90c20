#!/usr/bin/env bash
# dask 2026.8.0: percentile of an array, quantile and describe of a data frame lie above the truth, the further the more chunks there are.
# The guess was an approximation ("Approximate percentile of 1-D array") that errs in both directions by a percent of the ranks or less, and by less for
# more rows; the maintainers' word for sorted rows (dask#3115, closed) is that the accuracy is much better for rows in random order.
#
# Seen (2026-12-01): each chunk computes only the percentiles that are wanted, 0 and 100, and merge_percentiles counts all rows between two of them at the
# upper one, as if half of the chunk had its median. In random order the median of 100 chunks of 1,000 rows has rank 0.54, and that of 1,000 chunks of 100
# rows has 0.65; the 99th percentile has 0.996. Ten times as many rows in as many more chunks make it worse. If times rise threefold over the rows, the
# median of 10 partitions has rank 0.66. If a fast model's rows come before a slow one's, the 10th percentile has rank 0.35. It depends on its neighbours: with
# all percentiles from 0 to 100 asked for, it has 0.101. `describe` of a data frame has the same numbers as its 25, 50 and 75 %, and pandas the right
# ones under the same names. Rows sorted over all chunks are right, and so are internal_method="tdigest" (quantile: method="tdigest"), which needs crick, and a
# two-dimensional array, whose percentiles are exact. Nothing warns.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq --no-compile dask==2026.8.0 numpy==2.4.6 pandas==3.1.1 pyarrow==26.0.1 crick==0.0.8
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd

changed = "the behaviour has changed"
random = np.random.default_rng(0)
print(f"dask {dask.__version__}: ranks of the percentiles 50, 90 and 99")


def ranks(values, found):
    return np.searchsorted(np.sort(values), np.atleast_1d(found)) / len(values)


def percentiles(values, rows, wanted, **more):
    return ranks(values, da.percentile(da.from_array(values, chunks=rows), wanted, **more).compute())


medians = {}
for rows, chunks in ((10_000, 10), (1_000, 10), (1_000, 100), (100, 10), (100, 100), (100, 1_000)):
    times = random.lognormal(3, 1, rows * chunks)
    seen = percentiles(times, rows, [50, 90, 99])
    digest = percentiles(times, rows, [50, 90, 99], internal_method="tdigest")
    print(f"random order, {chunks} chunks of {rows} rows: {seen.round(3)}, with tdigest {digest.round(3)}")
    medians[rows, chunks] = seen[0]
    assert np.abs(digest - [0.5, 0.9, 0.99]).max() < 0.01
assert medians[1_000, 100] > 0.525 and medians[100, 1_000] > medians[100, 100] > medians[100, 10] > 0.53, changed
ten = [percentiles(random.lognormal(3, 1, 100_000), 1_000, 50)[0] for _ in range(10)]
print(f"the median of 100 chunks of 1,000 rows, 10 times: {min(ten):.3f} to {max(ten):.3f}")
assert min(ten) > 0.51, changed
times = np.sort(times)
assert np.abs(percentiles(times, 1_000, [50, 90, 99]) - [0.5, 0.9, 0.99]).max() < 0.001
table = da.from_array(random.lognormal(3, 1, (10_000, 2)), chunks=(1_000, 2))
assert np.allclose(da.percentile(table, 50, axis=0).compute(), np.median(table.compute(), axis=0))

rising = random.lognormal(3, 1, 100_000) * np.linspace(1, 3, 100_000)
models = np.concatenate([random.lognormal(middle, 0.3, 50_000) for middle in (2, 4)])
for name, times, wanted in (("times that rise threefold", rising, [50]), ("a fast and a slow model", models, [10, 90])):
    alone, among = percentiles(times, 10_000, wanted), percentiles(times, 10_000, list(range(101)))[wanted]
    print(f"{name}, 10 chunks: the percentiles {wanted} have the ranks {alone.round(3)}, among all percentiles {among.round(3)}")
    assert alone[0] - wanted[0] / 100 > 0.12 and np.abs(among - np.array(wanted) / 100).max() < 0.02, changed

frame = pd.DataFrame({"ms": random.lognormal(3, 1, 100_000)})
parted = dd.from_pandas(frame, npartitions=100, sort=False)
names = ["25%", "50%", "75%"]
described = parted.describe().compute()["ms"][names]
print(pd.DataFrame({"dask, 100 partitions": described, "pandas": frame.describe()["ms"][names]}).round(2).to_string())
assert (ranks(frame["ms"], described) - [0.25, 0.5, 0.75] > 0.02).all(), changed
assert abs(ranks(frame["ms"], parted["ms"].quantile(0.5).compute())[0] - ranks(frame["ms"], described["50%"])[0]) < 0.001
assert abs(ranks(frame["ms"], parted["ms"].quantile(0.5, method="tdigest").compute())[0] - 0.5) < 0.01
PYTHON
