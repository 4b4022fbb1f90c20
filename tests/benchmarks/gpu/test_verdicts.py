"""Every line of the table is met at its limit and missed just before it; what was not measured never passes."""

import json

import pytest

from benchmarks.gpu.report import write_report
from benchmarks.gpu.verdict import passes
from benchmarks.gpu.verdicts import SPEED, verdicts
from tests.benchmarks.gpu.recorded import MACHINE, kernels, model, passing, plan


def word(models, line):
    [found] = {(verdict.line, verdict.word) for verdict in verdicts(models) if verdict.line == line}
    return found[1]


def test_a_machine_that_meets_everything_passes():
    lines = verdicts(passing())
    assert passes(lines)
    assert {line.word for line in lines} == {"passed", "told"}
    assert [line.line for line in lines if line.model == SPEED] == [
        "int8 against our fp16, 32 x 128",
        "int8 against our fp16, 32 x 384",
        "int8 against our fp16, 1 x 128",
        "int8 against torch eager fp16, 1 x 128",
        "int8 against torch eager fp16, 32 x 128",
        "int8 against torch.compile fp16, 32 x 128",
        "int8 against torch.compile fp16, 32 x 384",
        "int8 against torch.compile fp16, 1 x 128",
        "parity, sm90",
        "int8 share, sm90",
        "drop of the metric in the server",
        "scaling to 2 GPUs",
    ]
    assert not any("against" in line.line for line in lines if line.model != SPEED)


@pytest.mark.parametrize(("shape", "limit"), [((32, 128), 1.6), ((32, 384), 1.6), ((1, 128), 1.0)])
def test_our_fp16(shape, limit):
    line = f"int8 against our fp16, {shape[0]} x {shape[1]}"
    for value, expected in ((limit, "passed"), (limit - 0.01, "missed")):
        assert word({SPEED: model(plans={"90": plan({shape: value})})}, line) == expected
    assert word({SPEED: model(plans={"80": plan({shape: limit - 0.01}), "90": plan({})})}, line) == "missed"  # the slowest kind counts


@pytest.mark.parametrize(("shape", "limit"), [((1, 128), 10.9), ((32, 128), 2.0)])
def test_torch_eager(shape, limit):
    line = f"int8 against torch eager fp16, {shape[0]} x {shape[1]}"
    for value, expected in ((limit + 1e-9, "passed"), (limit - 0.01, "missed")):
        assert word({SPEED: model(eager=value)}, line) == expected


def test_torch_compile_is_told():
    [value] = [line.value for line in verdicts({SPEED: model(compiled=1.25)}) if line.line == "int8 against torch.compile fp16, 1 x 128"]
    assert value == pytest.approx(1.25)
    assert word({SPEED: model(compiled=0.5)}, "int8 against torch.compile fp16, 1 x 128") == "told"


def served(value):
    return {"served": value, "baseline": 0.9, "max_drop": 0.005, "reason": None}


@pytest.mark.parametrize(
    ("changes", "line", "expected"),
    [
        ({"plans": {"90": plan({}, parity={"passed": False})}}, "parity, sm90", "missed"),
        ({"plans": {}}, "parity", "not measured"),
        ({"plans": {}}, "int8 share", "not measured"),
        ({"plans": {"90": plan({}, int8_share=0.95)}}, "int8 share, sm90", "passed"),
        ({"plans": {"90": plan({}, int8_share=0.94)}}, "int8 share, sm90", "missed"),
        ({"plans": {"90": plan({}, int8_share=None)}}, "int8 share, sm90", "not measured"),
        ({"plans": {"90": plan({}, rival={"precision": "bf16", "reason": None})}}, "int8 against our fp16, 1 x 128", "not measured"),
        ({"plans": {"90": plan({}, latency=[])}}, "int8 against our fp16, 1 x 128", "not measured"),
        ({"latency": []}, "int8 against torch eager fp16, 1 x 128", "not measured"),
        (
            {"accuracy": served(0.8949)},
            "drop of the metric in the server",
            "missed",
        ),
        ({"accuracy": served(0.91)}, "drop of the metric in the server", "passed"),
        ({"scaling": {"one": 1000.0, "all": 3600.0, "gpus": 4}}, "scaling to 4 GPUs", "passed"),
        ({"scaling": {"one": 1000.0, "all": 3590.0, "gpus": 4}}, "scaling to 4 GPUs", "missed"),
        ({"scaling": {"one": 1000.0, "all": 1000.0, "gpus": 1}}, "scaling to 1 GPUs", "told"),
        ({"scaling": {"one": None, "all": None, "gpus": 4}}, "scaling to 4 GPUs", "not measured"),
    ],
)
def test_each_other_line(changes, line, expected):
    models = {SPEED: model(**changes)}
    assert word(models, line) == expected
    assert passes(verdicts(models)) == (expected in ("passed", "told"))


def test_what_has_ended_a_check_is_the_reason_of_everything_after_it():
    from benchmarks.gpu.check import unmeasured

    lines = verdicts({SPEED: {**unmeasured(2), "error": "not ready: no memory"}})
    assert not passes(lines)
    assert {line.word for line in lines if line.limit is not None} == {"not measured"}
    assert {line.reason for line in lines if line.limit is not None} == {"not ready: no memory"}
    lines = verdicts({SPEED: {**model(), "scaling": {"one": None, "all": 1.0, "gpus": 2}, "error": "the server died"}})
    assert [line.reason for line in lines if line.word == "not measured"] == ["the server died"]


def test_what_was_not_measured_says_why():
    lines = verdicts({SPEED: model(latency=[], plans={})})
    assert all(line.reason for line in lines if line.word == "not measured")
    [reason] = [line.reason for line in lines if line.line == "int8 against torch eager fp16, 1 x 128"]
    assert reason == "the run did not time an int8 plan at 1 x 128"


@pytest.mark.parametrize("good", [True, False])
def test_the_report_has_every_line_and_figure(good, tmp_path):
    models = passing() if good else {SPEED: model(eager=1.5)}
    lines = write_report(tmp_path, MACHINE, models, kernels())
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["passed"] is good
    assert [entry["verdict"] for entry in document["verdicts"]] == [line.word for line in lines]
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# GPU check: passed" if good else "# GPU check: not passed")
    assert "2 x NVIDIA L4; driver 580.1; NVIDIA's images 25.09." in text
    assert all(f"| {line.model} | {line.line} |" in text for line in lines)
    assert f"| {SPEED} | sm90 | 32 x 384 | 30.000 | 60.000 (fp16) | 2.000 |  |" in text
    assert f"| {SPEED} | sm90 | 1 x 128 | 1.000 | 2.000 (fp16) | 2.000 | 1.250 |" in text
    assert ("**missed**" in text) is not good
    assert "- Command: `make gpu-check RELEASE=25.09`\n- Versions: python 3.12.3, triton 3.9.0, cuda 13.0, tensorrt" in text
    assert "- Clocks of GPU 0 in 90 s of work: 1200 to 1980 MHz, median 1700, of at most 1980 MHz, memory 2619 MHz, up to 690.5 W" in text
    assert "1979 by the data sheet of H100 SXM; 1500 by torch._int_mm" in text
    assert document["kernels"] == kernels()


def test_a_report_of_kernels_that_were_not_measured_and_clocks_that_were_not_told(tmp_path):
    lines = write_report(tmp_path, {**MACHINE, "clocks": []}, passing(), {"error": "no GPU"})
    assert not passes(lines)
    text = (tmp_path / "report.md").read_text()
    assert "- Clocks: nvidia-smi did not tell them" in text
    assert "| kernels | answers within their bounds |  | at least 1 | **not measured**: no GPU |" in text
