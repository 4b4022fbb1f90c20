"""Which engines are timed to the end whatever they take."""

from types import SimpleNamespace
from typing import Any

from compress.run.implicit import race_of


def job(variant: str, engine: str, precision: str = "fp32", float_precision: str = "fp32") -> tuple[str, Any]:
    return variant, SimpleNamespace(engine=engine, precision=precision, float_precision=float_precision)


def test_the_reference_and_the_first_engine_of_each_variant_stay() -> None:
    jobs = [
        job("baseline", "torch"),
        job("baseline", "torch", "bf16", "bf16"),
        job("baseline", "openvino"),
        job("baseline", "onnxruntime"),
        job("quantize", "openvino", "int8"),
        job("quantize", "openvino", "int8", "bf16"),
    ]
    race = race_of(jobs, frozenset({(1, 32)}))
    assert [rival.always for rival in race.rivals] == [True, False, True, False, True, False]
    groups = [rival.group for rival in race.rivals]
    assert (groups[2] == groups[3], groups[4] == groups[5], groups[3] == groups[4]) == (True, False, False)
    assert (race.needs_p99((1, 32)), race.needs_p99((8, 32))) == (True, False)
