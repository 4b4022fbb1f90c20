"""Dependent launches: every kernel of a pass is launched so where the plan says it, and the plan says it where that was measured faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from export.engines import torch_kernels, torch_kernels_decoder
from export.engines.torch_kernels import launches_of
from export.fused import compared_launches, launches, tuning
from export.fused.decoder import compared_launches as compared_steps
from export.fused.decoder.cache import Cache, New
from export.fused.decoder.forward import Decoder
from export.fused.decoder.parts import decoder_plan
from export.fused.decoder.plan import read_decoder, write_decoder
from export.fused.forward import Encoder
from export.fused.launches import Launches, Work, differing, fastest, refusal
from export.fused.parts import plan_of
from export.fused.plan import plan_from, read_plan, write_plan
from export.fused.rows import Rows
from export.kernels.launch import Launch
from foundation.models.folder import Checkpoint
from tests.export.fused import encoders
from tests.export.fused.decoder import decoders
from tests.export.fused.encoders import Shape
from tests.export.fused.test_launches import META, SEQUENCES, TOKENS, base, meta, t5

Interpreted = Callable[..., Any]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FASTER = Launches(True, {"1 x 8": {"plain": 2.0, "dependent": 1.0}})


class Pass:
    """Stands for a pass of one shape, with its times, and with how its answers differ each time they are compared."""

    def __init__(self, shape: str, plain: float, dependent: float, *different: str | None) -> None:
        self.shape, self.ms, self.different = shape, {"plain": plain, "dependent": dependent}, list(different)

    def differs(self) -> str | None:
        return self.different.pop(0) if self.different else None

    def works(self) -> Mapping[str, Work]:
        return {kind: partial(float, ms) for kind, ms in self.ms.items()}


def taken(*passes: Pass) -> Launches:
    return fastest(passes, lambda work: work())  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("passes", "dependent"),
    [
        ([Pass("1 x 8", 1.0, 0.5), Pass("32 x 8", 10.0, 11.0)], True),  # slower in the sum, faster in the mean of the shares
        ([Pass("1 x 8", 1.0, 0.95), Pass("32 x 8", 10.0, 11.0)], False),
        ([Pass("1 x 8", 1.0, 1.0)], False),
    ],
)
def test_the_faster_kind_is_taken_where_every_shape_counts_alike(passes: list[Pass], dependent: bool) -> None:
    chosen = taken(*passes)
    assert (chosen.dependent, chosen.reason) == (dependent, None)
    assert chosen.ms == {one.shape: one.ms for one in passes}


@pytest.mark.parametrize("different", [("3 of 8 logits",), (None, "3 of 8 logits")], ids=["before", "after"])
def test_other_bits_are_refused(different: tuple[str | None, ...]) -> None:
    chosen = taken(Pass("1 x 8", 2.0, 1.0), Pass("2 x 8", 2.0, 1.0, *different))
    assert not chosen.dependent
    assert chosen.line.startswith("plain (dependent ones changed 3 of 8 logits of 2 x 8; dependent 1 x 8: 1.000 ms, plain 2.000 ms")
    assert chosen.reported == {"launches": chosen.line}


def test_bits_are_compared() -> None:
    one = torch.tensor([0.0, 1.0, float("nan")])
    assert differing(one, one.clone()) is None
    assert differing(one, torch.tensor([-0.0, 1.0, float("nan")])) == "1 of 3 logits"


def test_lines() -> None:
    assert FASTER.line == "dependent (dependent 1 x 8: 1.000 ms, plain 2.000 ms)"
    assert (Launches().line, Launches().reported) == ("plain", {})


def test_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability, why in (((8, 9), "this GPU has 8.9"), ((9, 0), None), ((12, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert (refusal(CUDA) is None) if why is None else (why in str(refusal(CUDA)))
        assert FASTER.on(CUDA) == (why is None)
    assert not Launches().on(CUDA)
    assert "the device is cpu" in str(refusal(CPU))
    for release in ("12.2", None):
        monkeypatch.setattr(torch.version, "cuda", release)
        assert f"this torch has {release}" in str(refusal(CUDA))


def test_plans_hold_the_choice_and_plans_of_before_are_plain(tmp_path: Path) -> None:
    folder, path = encoders.checkpoint(tmp_path, Shape(config={"num_hidden_layers": 1})), tmp_path / "plan.safetensors"
    write_plan(replace(plan_of(Checkpoint(folder)), launches=FASTER), path)
    assert read_plan(path).launches == FASTER
    documents: list[Any] = []
    with patch("export.fused.plan.write_file", lambda *given: documents.append(given[2:])):
        write_plan(read_plan(path), path)
    ((document, tensors),) = documents
    assert plan_from({name: value for name, value in document.items() if name != "launches"}, tensors).launches == Launches()


def test_decoders_hold_the_choice(tmp_path: Path) -> None:
    folder, path = decoders.checkpoint(tmp_path, decoders.Shape("llama")), tmp_path / "plan.safetensors"
    write_decoder(replace(decoder_plan(Checkpoint(folder)), launches=FASTER), path)
    assert read_decoder(path).launches == FASTER


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("model", ["bert", "t5", "gated t5"])
def test_every_kernel_of_a_pass_is_launched_so(model: str, dependent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: made.append(launch))  # a method, which `append` itself is not
    monkeypatch.setattr(launches, "refusal", lambda device: None)
    ids = [meta(TOKENS, dtype=torch.int64) for _ in range(3)]
    rows = Rows(*ids, meta(SEQUENCES + 1, dtype=torch.int32), meta(SEQUENCES, dtype=torch.int64))
    plan = replace(base() if model == "bert" else t5(model == "gated t5"), launches=Launches(dependent))
    Encoder(plan, META, torch.float16).forward(rows)
    assert len(made) > 14
    assert {(launch.dependent, launch.options["launch_pdl"], launch.given["DEPENDENT"]) for launch in made} == {(dependent,) * 3}


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-dynamic", "w8a16", "w4a16"])
def test_every_kernel_of_a_decoder_is_launched_so(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: made.append(launch))  # a method, which `append` itself is not
    monkeypatch.setattr(launches, "refusal", lambda device: None)
    plan = decoder_plan(Checkpoint(decoders.checkpoint(tmp_path, decoders.Shape("llama", scheme, tables=True))))
    decoder = Decoder(replace(plan, launches=Launches(True)), META, torch.float16)
    ids, starts = [meta(6, dtype=torch.int64) for _ in range(3)], meta(3, dtype=torch.int32)
    decoder.forward(Rows(*ids, starts, meta(2, dtype=torch.int64)))
    read = len(made)
    cache = Cache(plan, META, torch.float16, 600, longest=300)
    table = meta(2, 19, dtype=torch.int32)
    decoder.step(New(*(tensor[:2] for tensor in ids), meta(2, dtype=torch.int32), meta(2, dtype=torch.int32), table), cache)
    names = {launch.kernel.fn.__name__ for launch in made[read:]}
    assert {"paged_attention_kernel", "combined_kernel", "w8a16_gemm_kernel"} <= names
    assert "packed_attention_kernel" in {launch.kernel.fn.__name__ for launch in made[:read]}
    assert all(launch.dependent for launch in made)


def compared(folder: Path, *, wrong: bool) -> tuple[str, str | None, list[str], int]:
    """Returns shape and difference of a pass whose recordings run again, the kinds that are timed, and the rows of the recordings."""
    plan = plan_of(Checkpoint(folder))
    with patch.object(compared_launches, "BATCHES", 2), torch.inference_mode():
        (one,) = compared_launches.passes(plan, CPU, torch.float32, [(2, 5)], None, encoders.Again)
        if wrong:
            graphs = one._graphs["dependent"]
            graphs._forward = lambda rows: _nudged(Encoder(plan, CPU).forward(rows))
        difference = one.differs()
        works = one.works()
        return one.shape, difference, list(works), len(works["plain"]())  # type: ignore[arg-type]


def _nudged(logits: Tensor) -> Tensor:
    logits[-1, -1] += 1
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_a_pass_is_compared(interpreted: Interpreted, tmp_path: Path, wrong: bool) -> None:
    folder = encoders.checkpoint(tmp_path, Shape(config={"num_hidden_layers": 1}))
    shape, difference, kinds, rows = interpreted(compared, folder, wrong=wrong)
    assert (shape, kinds, rows) == ("2 x 5", ["plain", "dependent"], 2)
    assert difference == ("1 of 6 logits" if wrong else None)


def compared_decoder(folder: Path, *, wrong: bool) -> tuple[str, str | None, int]:
    """Returns shape and difference of steps whose recordings run again, and the texts of the last step."""
    plan = decoder_plan(Checkpoint(folder))
    with patch.multiple(compared_steps, BATCHES=2, STEPS=2), torch.inference_mode():
        (one,) = compared_steps.passes(plan, CPU, torch.float32, [(2, 5)], None, encoders.Again)
        if wrong:
            decoder: Any = one._texts["dependent"]._decoder
            step = decoder.step
            decoder.step = lambda new, cache: _nudged(step(new, cache))
        difference = one.differs()
        return one.shape, difference, len(one.works()["dependent"]())  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_steps_are_compared(interpreted: Interpreted, tmp_path: Path, wrong: bool) -> None:
    folder = decoders.checkpoint(tmp_path, decoders.Shape("llama"))
    shape, difference, texts = interpreted(compared_decoder, folder, wrong=wrong)
    assert (shape, texts) == ("a step of 2 behind 5", 2)
    assert difference is None if not wrong else str(difference).startswith("2 of ")


def request(lines: list[str]) -> Any:
    target = SimpleNamespace(device="cuda", batch_sizes=(8, 1))
    return SimpleNamespace(target=target, buckets=(8, 64), engine="torch_kernels", log=lines.append)


def test_a_build_compares_the_shapes_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "refusal", lambda device: None)
    monkeypatch.setattr(tuning, "tuner", lambda device: None)
    asked, lines = list[Any](), list[str]()

    def passes(device: torch.device, dtype: torch.dtype, shapes: Any, tiles: Any, record: Any) -> Any:
        asked.append((device, dtype, list(shapes)))
        return [Pass(f"{rows} x {length}", 2.0, 1.0) for rows, length in shapes]

    chosen = launches_of(request(lines), 12, "fp16", passes, lambda work: work())  # type: ignore[arg-type, return-value]
    assert asked == [(CUDA, torch.float16, [(1, 8), (1, 12), (8, 8), (8, 12)])]
    assert chosen.dependent
    assert lines == [f"torch_kernels: launches: {chosen.line}"]


def test_a_build_says_why_launches_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    lines: list[str] = []
    chosen = launches_of(request(lines), 12, "fp32", lambda *_: pytest.fail("compared"))
    assert (chosen.dependent, chosen.ms) == (False, {})
    (line,) = lines
    assert "9.0" in line
    assert "8.0" in line
    assert chosen.reported == {"launches": chosen.line}


def built(engine: Any, folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Builds an engine for a GPU that is not there, on which dependent launches are faster; returns what `launches_of` was given."""
    asked: list[Any] = []

    def choose(*given: Any) -> Launches:
        asked.append(given[1:3])
        return FASTER

    monkeypatch.setattr(torch_kernels, "absence", lambda device: None)
    monkeypatch.setattr(engine, "absence", lambda device: None)
    monkeypatch.setattr(engine, "launches_of", choose)
    monkeypatch.setattr(engine, "nodes_of", lambda model: {})
    monkeypatch.setattr(torch_kernels, "with_attention", lambda plan, request: plan)
    given = SimpleNamespace(
        folder=out, checkpoint=Checkpoint(folder), model=None, buckets=(8,), target=SimpleNamespace(device="cuda"), float_precision="fp32",
        fp16_float_part=True, kv_cache="float", engine=engine.__name__, entry=lambda *given, **named: None,
    )  # fmt: skip
    list(engine.build(given))
    return asked


def test_an_encoder_is_built_with_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = encoders.checkpoint(tmp_path, Shape(config={"num_hidden_layers": 1}))
    assert built(torch_kernels, folder, tmp_path, monkeypatch) == [(encoders.LENGTH, "fp16")]
    assert read_plan(tmp_path / torch_kernels.FILE).launches == FASTER


def test_a_decoder_is_built_with_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for write in ("export.generation.text_files.write_text_files", "export.generation.genai_folder.write_generation_config"):
        monkeypatch.setattr(write, lambda *_: None)
    folder = decoders.checkpoint(tmp_path, decoders.Shape("llama"))
    assert built(torch_kernels_decoder, folder, tmp_path, monkeypatch) == [(decoders.LENGTH, "fp16")]
    assert read_decoder(tmp_path / torch_kernels_decoder.FOLDER / torch_kernels_decoder.FILE).launches == FASTER


def test_engines_report_the_choice() -> None:
    opened: Any = SimpleNamespace(_runner=SimpleNamespace(plan=SimpleNamespace(launches=FASTER), float_precision="fp16"))
    assert torch_kernels.TorchKernels.reported(opened) == {"launches": FASTER.line}
    assert torch_kernels_decoder.TorchKernelsDecoder.reported(opened) == {"keys and values": "fp16", "launches": FASTER.line}
