"""Int8 layers in training that two processes share, against the same layers in one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.quantize.training.share_processes import CASES, results, together
from tests.ranks import in_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """What two processes come to, by case."""
    file = tmp_path_factory.mktemp("shares") / "results.pt"
    in_ranks(2, together, file)
    found: dict[str, dict[str, Tensor]] = torch.load(file)
    return found


@pytest.mark.parametrize("case", CASES)
def test_shares_come_to_the_integers_and_gradients_of_whole_layers(case: str, shared: dict[str, dict[str, Tensor]]) -> None:
    expected, mine = results(CASES[case]), shared[case]
    assert mine.keys() == expected.keys()
    assert torch.equal(mine["trained"], expected["trained"])  # the sums are those of integers
    assert torch.equal(mine["evaluated"], expected["evaluated"])
    for name, value in expected.items():
        assert mine[name].shape == value.shape, name
        scale = max(1e-6, float(value.abs().max()))
        most = 1e-4 if "input_scale" in name else 1e-5  # one sum over all inputs, of terms of either sign, which nearly cancel
        torch.testing.assert_close(mine[name] / scale, value / scale, rtol=0, atol=most, msg=lambda told, name=name: f"{name}: {told}")


@pytest.mark.parametrize("case", CASES)
def test_the_cases_clip_and_learn(case: str) -> None:
    found = results(CASES[case])
    learned = CASES[case].get("learned", "lsq")
    assert ("0.input_scale.change" in found) == (learned != "fixed")
    assert ("2.weight_scale.change" in found) == (learned == "lsq")
    assert torch.equal(found["trained"], found["evaluated"])
    assert learned == "fixed" or float(found["2.input_scale.change"].abs()) > 0
