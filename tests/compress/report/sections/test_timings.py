"""The report says how busy the machine was, and which latencies suffered from it."""

from typing import Any

from compress.report.model.variant import Latency
from compress.report.phrases import trust_in
from compress.report.sections.timings import interval, mark, sentence
from tests.plain_reports import contents

MACHINE: dict[str, Any] = {"cores": 2, "other_cores": 0.84, "stolen": 0.0, "throttled_s": 2.5, "calibration_spread": 0.31}
MACHINE["came_first"] = True


def test_the_sentence_has_the_figures() -> None:
    text = sentence(contents({"timings": {"rows": 12, "estimated": 5, "busy": 3, "machine": MACHINE}})) or ""
    for part in ("0.8 of the 2 cores", "waited for the engines", "2.5 s", "31 %", "5 of 12", "3 are too noisy"):
        assert part in text
    quiet = sentence(contents({"timings": {"rows": 12, "estimated": 0, "busy": 0, "machine": MACHINE}})) or ""
    assert "12 latencies were measured" in quiet
    assert "estimated" not in quiet
    assert sentence(contents({})) is None, "runs of earlier versions were not watched"


def test_rows_are_marked() -> None:
    assert mark(Latency.model_validate({"busy": True, "estimated": True})) == "machine busy"
    assert mark(Latency.model_validate({"busy": False, "estimated": True})) == "estimated"
    assert mark(Latency.model_validate({"turns_ms": [1.0]})) == "one turn"
    assert mark(Latency.model_validate({"turns_ms": [1.0, 1.1, 1.0]})) is mark(Latency.model_validate({})) is None
    assert "1.9 to 2.2 ms" in (interval(Latency.model_validate({"interval_ms": [1.9, 2.2], "disturbed": 0.25})) or "")
    assert interval(Latency.model_validate({})) is None


def test_a_headline_says_whether_it_can_be_relied_on() -> None:
    assert "machine busy" in trust_in(3.0, 5.0, busy=True)
    assert all(end in trust_in(3.0, 5.25, busy=False) for end in ("3.00", "5.25"))
    assert trust_in(None, None, busy=False) == ""
