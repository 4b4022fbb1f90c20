"""The verdicts on our own kernels, from what `benchmarks.gpu.figures` measured.

line                                                          asked for
answers of the kernels, against their references in torch     all of them within the bounds
block-sparse GEMM, 80 % of the blocks zero                    2.5 times as fast as the dense one at 4096 x 4096 x 4096; told for
                                                              BERT-large's layers, with what memory allows there
a row alone and packed                                        the same logits
sequences per second on packed SQuAD lengths                  told beside MLPerf's 9,164
BERT-large on our kernels against torch eager fp16            told; the limits are those of the plans
share of the peak, of every kernel                            told
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.verdict import Verdict

KERNELS = "kernels"
"""Stands in the column of the models."""
SPARSE_SHAPE, SPARSE_SIDES, SPARSE = (4096, 4096), (32, 64), 2.5
DIFFERENCE = 0.01
"""Most that logits of a row may differ from those of the row alone."""
MLPERF = 9164.0
"""Sequences per second of an H200: MLPerf Inference v4.1, bert-99, offline, 73,309.5 on eight."""
EAGER = "BERT-large int8 on our kernels against torch eager fp16"
NONE = "nothing was measured"


def kernel_verdicts(found: Mapping[str, Any]) -> Iterator[Verdict]:
    """Yields every line.

    Args:
        found: What `benchmarks.gpu.figures` wrote, and `error`, what has ended it, or None.
    """
    yield _answers(found)
    yield from _sparse(found)
    yield from _packed(found)
    shapes = found.get("shapes") or {"rows": [], "reason": _why(found)}
    if shapes["reason"] is not None:
        yield Verdict(KERNELS, EAGER, None, None, reason=shapes["reason"])
    for row in shapes["rows"]:
        told = f"{row['ours_ms']:.3f} ms beside {row['eager_ms']:.3f}"
        yield Verdict(KERNELS, f"{EAGER}, {row['batch']} x {row['sequence']}", row["speedup"], None, reason=told)
    for row in found.get("kernels", ()):
        peak = f"share of the {row['unit']} peak" if row["unit"] else "share of the peak"
        yield Verdict(KERNELS, f"{peak}, {row['kernel']}", row["share"], None, reason=row["reason"] or _told(row))


def _answers(found: Mapping[str, Any]) -> Verdict:
    rows = found.get("checked", ())
    failed = [f"{row['kernel']}: {row['reason']}" for row in rows if not row["passed"]]
    value = None if not rows else 1 - len(failed) / len(rows)
    return Verdict(KERNELS, "answers within their bounds", value, 1.0, reason="; ".join(failed) or (_why(found) if value is None else None))


def _sparse(found: Mapping[str, Any]) -> Iterator[Verdict]:
    rows = {(row["outputs"], row["inputs"], row["side"]): row for row in found.get("sparse", ())}
    judged = {(*SPARSE_SHAPE, side) for side in SPARSE_SIDES}
    for shape in sorted(judged | rows.keys()):
        outputs, inputs, side = shape
        line = f"block-sparse GEMM in {side} x {side}, 80 % zeros, against the dense one, 4096 x {outputs} x {inputs}"
        row = rows.get(shape)
        if row is None or row["speedup"] is None:
            yield Verdict(KERNELS, line, None, SPARSE if shape in judged else None, reason=_why(found) if row is None else row["reason"])
            continue
        allowed = None if row["allowed"] is None else f"{row['allowed']:.2f} is what memory and units of this GPU allow"
        yield Verdict(KERNELS, line, row["speedup"], SPARSE if shape in judged else None, reason=allowed)


def _packed(found: Mapping[str, Any]) -> Iterator[Verdict]:
    row = found.get("packed") or {"sequences_per_s": None, "reason": _why(found)}
    rate = row["sequences_per_s"]
    told = row["reason"] if rate is None else f"{rate / MLPERF:.1%} of the {MLPERF:,.0f} of an H200 in MLPerf v4.1"
    yield Verdict(KERNELS, "BERT-large int8, sequences per second on packed SQuAD lengths", rate, None, reason=told)
    reason = row["reason"] if rate is None else None
    yield Verdict(KERNELS, "logits of a row alone and packed", row.get("difference"), DIFFERENCE, at_most=True, reason=reason)


def _told(row: Mapping[str, Any]) -> str:
    if row["share"] is None:
        return f"the peak of {row['unit']} on this GPU is not known; {row['ms']:.4f} ms"
    floor = "" if row["floor_share"] is None else f"; {row['floor_share']:.0%} of what memory and units allow"
    return f"{row['ms']:.4f} ms{floor}"


def _why(found: Mapping[str, Any]) -> str:
    return str(found.get("error") or NONE)
