"""Attention's loop over keys has fewer instructions where sums are scaled only when a maximum grows, wherever that is the default."""

import pytest
import torch

from benchmarks.gpu.cases import META
from benchmarks.gpu.rescaling import CASES, of_a_tile, scaled
from export.kernels.attention import lazy_by_default

pytestmark = pytest.mark.whole


@pytest.mark.parametrize("capability", [80, pytest.param(89, marks=pytest.mark.slow), pytest.param(90, marks=pytest.mark.slow), 100])
@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case == "float16, heads of 64" else pytest.mark.slow) for case in CASES])
def test_the_default_saves_instructions_and_spills_no_more(monkeypatch: pytest.MonkeyPatch, case: str, capability: int) -> None:
    class OnGpu:
        is_cuda, device, shape, dtype = True, torch.device("cuda"), (1, 1, CASES[case][3]), CASES[case][4]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(capability, 10))
    default = lazy_by_default(OnGpu(), META.halves(1))  # type: ignore[arg-type]
    each, lazy = (scaled(case, choice, capability) for choice in (False, True))
    saved = of_a_tile(each, 32)["a tile"] - of_a_tile(lazy, 32)["a tile"]
    if default:
        assert saved > 0
        assert lazy.spills <= each.spills
        assert of_a_tile(lazy, 32)["FMUL"] <= 4
    else:
        assert saved < 5 or lazy.spills > each.spills


def test_sums_in_float32_are_scaled_in_every_tile() -> None:
    assert not lazy_by_default(META.floats(1, 1, 64), META.floats(1))
    assert lazy_by_default(META.codes(1, 1, 64), META.halves(1))
