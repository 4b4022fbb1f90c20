"""Measured tiles: the fastest is taken, measured once, remembered for one GPU and one set of versions alone."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu.ahead_of_time import CAPABILITIES, INT8_MATRIX, LIMITS, compiled, count
from benchmarks.gpu.cases import META
from export.fused import tuning
from export.fused.tuning import CANDIDATES, Tuner, cache_file, remembered, size_of
from export.kernels import gemm
from export.kernels.activation_codes import Method
from export.kernels.epilogue import Int8Weight, Output
from export.kernels.gemm import Tile
from export.kernels.launch import Launch

pytestmark = pytest.mark.whole

BEST = CANDIDATES[3]
GELU = Output("gelu", scale=0.1)


def weight(outputs: int = 96, inputs: int = 64) -> Int8Weight:
    return Int8Weight(META.codes(outputs, inputs), META.empty(outputs))


class Clock:
    """Times launches by a list; `BEST` is the fastest, and what is too large does not run."""

    def __init__(self, too_large: tuple[Tile, ...] = ()) -> None:
        self.too_large, self.asked = too_large, 0

    def __call__(self, launch: Launch) -> float:
        self.asked += 1
        arguments = launch.arguments
        sides = (arguments[name] for name in ("TILE_N", "TILE_O", "TILE_I"))
        tile = Tile(*sides, launch.num_warps, launch.num_stages, arguments["HALVES"], arguments["PERSISTENT"])
        if tile in self.too_large:
            raise OutOfResources(1, 0, "shared memory")
        return 1.0 if tile == BEST else 2.0 + CANDIDATES.index(tile)


def test_the_fastest_tile_is_taken_and_measured_once(tmp_path: Path) -> None:
    clock = Clock()
    tuner = Tuner(tmp_path / "tiles.json", clock)
    for rows in (33, 64, 40):  # one power of two
        assert tuner(META.codes(rows, 64), weight(), GELU) == BEST
    assert clock.asked == len(CANDIDATES)
    for other in (
        (META.codes(65, 64), weight(), GELU),
        (META.codes(64, 64), weight(95), GELU),
        (META.codes(64, 64), weight(), Output("gelu")),
    ):
        asked = clock.asked
        tuner(*other)
        assert clock.asked == asked + len(CANDIDATES)


def test_another_process_reads_what_was_measured(tmp_path: Path) -> None:
    path, clock = tmp_path / "deep" / "tiles.json", Clock()
    Tuner(path, Clock())(META.codes(64, 64), weight(), GELU)
    before = Tuner(path, clock)
    assert before(META.codes(64, 64), weight(), GELU) == BEST
    assert clock.asked == 0
    Tuner(path, Clock())(META.codes(16, 64), weight(), GELU)
    before(META.codes(256, 64), weight(), GELU)  # writes beside what the other has written since
    assert sorted(remembered(path)) == ["16x96x64 gelu int8", "256x96x64 gelu int8", "64x96x64 gelu int8"]
    assert list(path.parent.iterdir()) == [path]


def test_a_tile_without_memory_is_left_out(tmp_path: Path) -> None:
    slower = min((tile for tile in CANDIDATES if tile != BEST), key=CANDIDATES.index)
    assert Tuner(tmp_path / "one.json", Clock((BEST,)))(META.codes(64, 64), weight(), GELU) == slower
    with pytest.raises(RuntimeError, match="int8 GEMM of 64x96x64 gelu int8 runs on this GPU"):
        Tuner(tmp_path / "none.json", Clock(CANDIDATES))(META.codes(64, 64), weight(), GELU)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"64x96x64 gelu int8": [1]}', '{"64x96x64 gelu int8": 3}'])
def test_a_damaged_file_counts_as_none(text: str, tmp_path: Path) -> None:
    path, clock = tmp_path / "tiles.json", Clock()
    path.write_text(text, encoding="utf-8")
    Tuner(path, clock)(META.codes(64, 64), weight(), GELU)
    assert clock.asked == len(CANDIDATES)
    assert json.loads(path.read_text(encoding="utf-8")) == {
        "64x96x64 gelu int8": [BEST.rows, BEST.outputs, BEST.inputs, 4, BEST.num_stages, False, False]
    }


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.warns(UserWarning, match="tiles cannot be remembered"):
        assert Tuner(tmp_path / "file" / "tiles.json", Clock())(META.codes(64, 64), weight(), GELU) == BEST


def test_each_fact_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A10")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    told = tuning.facts(torch.device("cuda"))
    assert (told["device"], told["capability"], told["torch_version"]) == ("NVIDIA A10", "8.6", torch.__version__)
    files = {cache_file(told), *(cache_file({**told, name: "other"}) for name in told)}
    assert len(files) == 1 + len(told) == 7
    assert {file.parent for file in files} == {tmp_path / "compress"}
    other = tmp_path / "gemm.py"
    other.write_text("other\n", encoding="utf-8")
    monkeypatch.setattr(gemm, "__file__", str(other))
    assert cache_file(tuning.facts(torch.device("cuda"))) not in files


def test_the_size_names_what_ends_the_gemm() -> None:
    assert size_of(META.codes(5, 64), weight(), Output(dtype=torch.float32)) == "8x96x64 none float32"
    sizes = {size_of(META.codes(5, 64), weight(), Output("gelu", scale=0.1, method=method)) for method in get_args(Method)}
    assert sizes >= {"8x96x64 gelu int8", "8x96x64 gelu int8 tanh"}
    assert len(sizes) == len(get_args(Method))


def test_a_tile_in_halves_is_remembered(tmp_path: Path) -> None:
    path, tile = tmp_path / "tiles.json", Tile(128, 128, 128, 8, 3, True)
    Tuner(path, lambda launch: 0.0 if launch.arguments["HALVES"] else 1.0, (BEST, tile))(META.codes(64, 64), weight(), GELU)
    assert list(remembered(path).values()) == [tile]


MATRIX: list[Any] = [pytest.param(tile, capability, marks=pytest.mark.slow) for tile in CANDIDATES for capability in CAPABILITIES]


@pytest.mark.parametrize(("tile", "capability"), MATRIX)
def test_every_candidate_is_within_the_limits(tile: Tile, capability: int) -> None:
    large = Int8Weight(META.codes(3072, 768), META.empty(3072), META.empty(3072))
    binary = compiled(gemm.launch(META.codes(4096, 768), 0.1, large, GELU, META.codes(4096, 3072), tile), capability)
    assert binary.over_limits() == []


@pytest.mark.slow
def test_persistent_programs_multiply_in_one_loop_without_spills() -> None:
    large = Int8Weight(META.codes(3072, 768), META.empty(3072), META.empty(3072))
    (tile, *_) = [tile for tile in tuning.WIDE if tile.persistent and tile.rows == 128]
    binary = compiled(gemm.launch(META.codes(4096, 768), 0.1, large, GELU, META.codes(4096, 3072), tile), 90)
    assert binary.over_limits() == []
    assert binary.spills == 0
    assert count(binary.hot_loop, *INT8_MATRIX) == 4
    assert count(binary.hot_loop, "STG") > 0  # the loop that multiplies ends tiles too


@pytest.mark.parametrize("tile", [tile for tile in tuning.WIDE if tile.two_passes])
@pytest.mark.parametrize(
    "method", [pytest.param("exact", marks=pytest.mark.slow), "fitted", pytest.param("logistic", marks=pytest.mark.slow)]
)
def test_two_programs_that_end_in_halves_share_a_multiprocessor(tile: Tile, method: Method) -> None:
    large = Int8Weight(META.codes(3072, 768), META.empty(3072), META.empty(3072))
    output = Output("gelu", scale=0.1, method=method)
    binary = compiled(gemm.launch(META.codes(4096, 768), 0.1, large, output, META.codes(4096, 3072), tile), 90)
    assert 2 * 32 * binary.num_warps * binary.registers <= LIMITS[90].registers
    assert 2 * binary.shared_bytes <= LIMITS[90].shared_bytes
    assert binary.spills == 0
    assert count(binary.instructions, "FCHK") <= 2  # divisions, each with a branch: for the scale, none for a code
