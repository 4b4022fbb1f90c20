"""Gradients of several processes against those of one backward pass over all rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foundation.machine.parallel import ALONE
from tests.foundation.training.processes.engine_processes import ROWS, setting, together, weights_after
from tests.ranks import in_ranks

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """The gradients that two processes come to, by plan and parameter."""
    folder = tmp_path_factory.mktemp("engine")
    in_ranks(2, together, folder)
    gradients: dict[str, dict[str, Tensor]] = torch.load(folder / "gradients.pt")
    return gradients


def reference() -> dict[str, Tensor]:
    """One process, no engine: a row at a time, in float64."""
    body, twice, x_bI = setting()
    body.double(), twice.double()
    for row_I in x_bI.double():
        terms = twice(body, row_I[None])
        (torch.stack([term.sum() for term in terms.values()]).sum() / ROWS).backward()  # type: ignore[no-untyped-call]
    named = {f"{part}.{name}": parameter for part, one in enumerate((body, twice)) for name, parameter in one.named_parameters()}
    return {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}


@pytest.mark.parametrize("plan", ["ddp", "fsdp2"])
def test_two_processes_sum_the_gradients_of_all_rows(plan: str, found: dict[str, dict[str, Tensor]]) -> None:
    expected, mine = reference(), found[plan]
    assert {"0.scalar", "1.projection.weight"} < expected.keys()
    # A parameter that no loss reads in any process has no gradient, so AdamW leaves it alone; nor has a frozen one.
    assert mine.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(mine[name].double(), gradient, rtol=1e-5, atol=1e-7, msg=lambda told, name=name: f"{name}: {told}")


@pytest.mark.parametrize("plan", ["ddp", "fsdp2"])
def test_lamb_takes_the_norms_of_whole_weights(plan: str, found: dict[str, dict[str, Tensor]]) -> None:
    expected, mine = weights_after(ALONE), found[f"{plan} lamb"]
    assert mine.keys() == expected.keys()
    before = dict(torch.nn.ModuleList(setting()[:2]).named_parameters())
    assert not torch.equal(expected["0.blocks.0.weight"], before["0.blocks.0.weight"])
    for name, weight in expected.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-5, atol=1e-6, msg=lambda told, name=name: f"{name}: {told}")
