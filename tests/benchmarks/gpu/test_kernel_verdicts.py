"""Verdicts on our own kernels: at their limits, just before them, and where nothing was measured."""

import pytest

from benchmarks.gpu.kernel_verdicts import KERNELS, kernel_verdicts
from benchmarks.gpu.verdict import passes
from tests.benchmarks.gpu.recorded import kernels, sparse_row

ANSWERS, PACKED, ALONE = (
    "answers within their bounds",
    "BERT-large int8, sequences per second on packed SQuAD lengths",
    "logits of a row alone and packed",
)
EAGER = "BERT-large int8 on our kernels against torch eager fp16, 1 x 128"


def sparse_line(side, outputs=4096):
    return f"block-sparse GEMM in {side} x {side}, 80 % zeros, against the dense one, 4096 x {outputs} x 4096"


def lines(**changes):
    found = list(kernel_verdicts(kernels(**changes)))
    assert {line.model for line in found} == {KERNELS}
    return {line.line: line for line in found}


def test_everything_passes_and_every_line_is_there():
    found = lines()
    assert passes(list(found.values()))
    assert list(found) == [
        ANSWERS,
        sparse_line(64, 1024),
        sparse_line(32),
        sparse_line(64),
        PACKED,
        ALONE,
        EAGER,
        "share of the int8 peak, int8 GEMM, 4096 x 1024 x 4096",
    ]
    assert found[sparse_line(64, 1024)].word == "told"  # 2.0: what memory allows there is told beside it
    assert found[sparse_line(64, 1024)].reason == "4.30 is what memory and units of this GPU allow"
    assert found[PACKED].value == 4582
    assert found[PACKED].reason == "50.0% of the 9,164 of an H200 in MLPerf v4.1"
    assert (found[EAGER].value, found[EAGER].word, found[EAGER].reason) == (12, "told", "0.500 ms beside 6.000")
    assert list(found.values())[-1].reason == "0.0300 ms; 58% of what memory and units allow"


@pytest.mark.parametrize("side", [32, 64])
def test_block_sparse(side):
    for speedup, word in ((2.5, "passed"), (2.49, "missed")):
        rows = [sparse_row(speedup, side=side), sparse_row(9.0, side=96 - side)]
        found = lines(sparse=rows)
        assert found[sparse_line(side)].word == word
        assert found[sparse_line(96 - side)].word == "passed"
    broken = {**sparse_row(3.0, side=side), "speedup": None, "reason": "OutOfResources: shared memory"}
    assert lines(sparse=[broken])[sparse_line(side)].reason == "OutOfResources: shared memory"
    assert lines(sparse=[broken])[sparse_line(side)].word == "not measured"


def test_a_kernel_that_answers_wrongly_is_missed_and_named():
    wrong = {"kernel": "int8 QKV", "passed": False, "reason": "3 of 9 int8 outputs are beyond the bound, by up to 5"}
    found = lines(checked=[{"kernel": "int8 GEMM", "passed": True, "reason": None}, wrong])[ANSWERS]
    assert (found.word, found.value) == ("missed", 0.5)
    assert found.reason == "int8 QKV: 3 of 9 int8 outputs are beyond the bound, by up to 5"


def test_packed_rows_have_to_have_the_logits_of_the_row_alone():
    for difference, word in ((0.01, "passed"), (0.011, "missed")):
        assert lines(packed={"sequences_per_s": 1.0, "difference": difference, "reason": None})[ALONE].word == word
    failed = lines(packed={"sequences_per_s": None, "reason": "OutOfMemoryError: 80 GiB"})
    assert failed[ALONE].word == "not measured"
    assert {failed[ALONE].reason, failed[PACKED].reason} == {"OutOfMemoryError: 80 GiB"}


def test_shares_without_a_peak_or_a_time_say_so():
    row = {"kernel": "k", "unit": "fp16", "ms": 0.5, "tera_per_s": 1.0, "share": None, "floor_share": None, "tile": None, "reason": None}
    assert lines(kernels=[row])["share of the fp16 peak, k"].reason == "the peak of fp16 on this GPU is not known; 0.5000 ms"
    broken = {**row, "unit": None, "ms": None, "reason": "CompilationError: why"}
    assert lines(kernels=[broken])["share of the peak, k"].reason == "CompilationError: why"


def test_what_has_ended_the_process_is_the_reason_of_everything():
    found = list(kernel_verdicts({"error": "python -m benchmarks.gpu.figures ended with status 1: why"}))
    assert not passes(found)
    assert {line.word for line in found if line.limit is not None} == {"not measured"}
    assert {line.reason for line in found} == {"python -m benchmarks.gpu.figures ended with status 1: why"}
    assert len(found) == 6
