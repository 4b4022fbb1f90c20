"""Settings of all tests. Hypothesis measures no time: a loaded machine is no failure."""

import atexit
import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # tiny models: a second thread only waits; child processes read it too

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from compress.run.speed import Speed
from foundation.core.resampling import RESAMPLES
from foundation.machine.environment import cache_folder
from tests import few_draws, without_clocks
from tests.cached_folder import cached_folder
from tests.engines_inside import inside
from tests.traced_once import LIBRARIES, SOURCES, traced_once

NORMAL = torch.nn.init.normal_
torch.set_num_threads(1)
TIMELESS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("timeless", TIMELESS, max_examples=15)  # each test run draws others
settings.register_profile("thorough", TIMELESS, max_examples=500)  # --hypothesis-profile thorough
settings.load_profile("timeless")


def pytest_collectstart() -> None:
    """Collected modules and tests are no garbage; a look at all of them takes half a second, and comes twenty times."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With the marker `first(n)` all but the first n parameters of a test are slow."""
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("first")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            seen[name] += 1
            if seen[name] > mark.args[0]:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: the garbage collector looks at what comes after them alone, and less often."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)
    gc.enable()


atexit.register(gc.unfreeze)  # after pytest's last two looks; libraries that count their objects at the end find none left


def pytest_runtest_setup() -> None:
    """Every test draws the same numbers, whichever ones ran before it in its process."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # `torch.manual_seed` would format two stacks for devices that are not
        torch.cuda.manual_seed_all(0)
    np.random.seed(0)  # what libraries draw from


@pytest.fixture(scope="session")
def folder_of_traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where graphs lie: of all processes of this test run, and of earlier ones with the same libraries and sources."""
    own = tmp_path_factory.getbasetemp()
    return cached_folder("traced", LIBRARIES, SOURCES) or (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "traced"


@pytest.fixture(scope="session", autouse=True)
def _graphs_are_traced_once(folder_of_traces: Path) -> Iterator[None]:
    with traced_once(folder_of_traces):
        yield


@pytest.fixture(scope="session", autouse=True)
def _kernels_are_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels leave nothing in the home folder. Their compiler knows by itself what it has compiled of the same source."""
    folder = cached_folder("kernels", ("triton",), ("export/kernels", "export/fused")) or tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def _machine_has_a_known_speed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test times this machine, whose pool of threads of OpenMP would also stop forked processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "compress.run.speed.measured",
            lambda threads: Speed(macs_per_s=1e10 * threads, trained_per_s=1e10 * threads, python_s=0.03, written_per_s=1e9),
        )
        patch.setattr("compress.run.bandwidth.ARRAY_BYTES", 2**16)
        yield


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_user_stays_as_it_is(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs record figures of this machine in a folder of the tests. The server environment is the user's."""
    folder, own = tmp_path_factory.mktemp("cache"), cache_folder()
    (folder / own.name).mkdir()
    for entry in own.iterdir() if own.is_dir() else ():
        if entry.name.startswith("server-"):
            (folder / own.name / entry.name).symlink_to(entry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def _files_may_stay_in_memory() -> Iterator[None]:
    """No test takes the power away; a run waits for the disk more than a hundred times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _intervals_take_few_draws() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        few_draws.draw(patch, few_draws.DRAWS)
        yield


@pytest.fixture(scope="module")
def all_draws() -> Iterator[None]:
    """For `pytest.mark.usefixtures`: intervals of a module take as many draws as those of users."""
    with pytest.MonkeyPatch.context() as patch:
        few_draws.draw(patch, RESAMPLES)
        yield


@pytest.fixture(autouse=True)
def _weights_are_drawn() -> Iterator[None]:
    """Blames the test that leaves new models without values; later ones would read what their memory held."""
    yield
    assert torch.nn.init.normal_ is NORMAL, "torch.nn.init was left patched: new layers get no values"


@pytest.fixture(scope="module")
def engines_inside() -> Iterator[None]:
    """For `pytest.mark.usefixtures`: engines of a module open in the process of the tests."""
    with inside():
        yield


@pytest.fixture(scope="module")
def no_clocks() -> Iterator[None]:
    """For `pytest.mark.usefixtures`: nothing is timed in a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foundation.measure.latency.measure", without_clocks.measure)
        yield
