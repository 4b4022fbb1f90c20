"""One finished run, without `track`, for all tests of where runs are sent to."""

from pathlib import Path

import pytest

from compress.pipeline import run
from compress.recipe import check
from foundation.core.progress import ConsoleProgress
from tests import without_clocks
from tests.compress.track.tiny_run import RAW
from tests.engines_inside import inside


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the run; tests work on a copy."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with inside(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("foundation.measure.latency.measure", without_clocks.measure)
        run(check(RAW), folder, progress=ConsoleProgress("silent"))
    return folder
