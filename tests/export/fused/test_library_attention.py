"""Attention of torch's kernel in an encoder: called as torch declares it, taken where it is faster, refused where it is missing."""

import importlib.util
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from export.engines.torch_kernels import with_attention
from export.fused import library_attention
from export.fused.forward import Encoder
from export.fused.parts import plan_of
from export.fused.plan import read_plan, write_plan
from export.fused.rows import filled, pack
from foundation.core.errors import InputError
from foundation.models.folder import Checkpoint
from tests.export.fused import encoders
from tests.export.fused.encoders import Shape

pytestmark = pytest.mark.whole

Interpreted = Callable[..., Any]
CUDA = torch.device("cuda")


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`, written out; rows of no sequence are not numbers."""
    assert cu_seq_k is not None
    assert (query.dtype, cu_seq_q.dtype, num_splits, max_q, scale is not None) == (torch.float16, torch.int32, 1, max_k, True)
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert int(cu_seq_q.diff().max()) <= max_q
    assert enable_gqa == (query.shape[1] != key.shape[1])
    out, shared = torch.full_like(query, float("nan")), query.shape[1] // key.shape[1]
    for begin, end in itertools.pairwise(cu_seq_q.tolist()):
        q, k, v = (part[begin:end].float().transpose(0, 1) for part in (query, key, value))
        k, v = (part.repeat_interleave(shared, 0) for part in (k, v))
        out[begin:end] = ((q @ k.transpose(1, 2) * scale).softmax(dim=2) @ v).transpose(0, 1).half()
    return out


def states_by(folder: Path, kernel: str) -> tuple[Tensor, Tensor]:
    """Returns the states of the first tokens, and of the same rows filled up, in float16; torch's kernel is the naive one."""
    path = folder / "plan.safetensors"
    write_plan(replace(plan_of(Checkpoint(folder)), attention=kernel), path)
    given = encoders.features(3)
    with patch.object(varlen, "varlen_attn", naive), patch.object(library_attention, "refusal", lambda *_: None):
        encoder = Encoder(read_plan(path), torch.device("cpu"), torch.float16)
        rows = pack(given, encoder.limits)
        return encoder.pooled(rows), encoder.pooled(filled(rows, len(rows.word) + 5, rows.sequences + 2))[: rows.sequences]


def test_the_naive_kernel_has_the_signature_of_torchs() -> None:
    ours, theirs = (list(inspect.signature(one).parameters.values()) for one in (naive, varlen.varlen_attn))
    assert [(one.name, one.kind, one.default) for one in ours] == [(one.name, one.kind, one.default) for one in theirs]


@pytest.mark.first(1)
@pytest.mark.parametrize("floats", [(), ("attention.output.dense",)], ids=["codes", "floats"])
def test_the_states_are_those_of_our_kernel(interpreted: Interpreted, tmp_path: Path, floats: tuple[str, ...]) -> None:
    folder = encoders.checkpoint(tmp_path, Shape(floats=floats, config={"num_hidden_layers": 1}))
    ours, _ = interpreted(states_by, folder, "packed")
    theirs, full = interpreted(states_by, folder, "varlen")
    assert torch.isfinite(full).all()
    assert torch.equal(theirs, full)
    torch.testing.assert_close(theirs, ours, rtol=0.02, atol=0.05)


def timed_codes(folder: Path) -> tuple[Tensor, Tensor]:
    """Returns what the work that is timed writes, and the codes of the exact attention of what it read."""
    known, read = plan_of(Checkpoint(folder)), []

    def keep(*arguments: Any, **named: Any) -> Tensor:
        read.append(naive(*arguments, **named))
        return read[-1]

    keep.__signature__ = inspect.signature(naive)  # type: ignore[attr-defined]
    with patch.object(varlen, "varlen_attn", keep):
        written: Any = library_attention._works(known, known.blocks[0], torch.device("cpu"), 12, 2)["varlen"]()
    return written, (read[0].float() / known.blocks[0].out.input_scale).round().clamp(-128, 127).to(torch.int8)


def test_the_work_that_is_timed_ends_in_codes(interpreted: Interpreted, tmp_path: Path) -> None:
    written, wanted = interpreted(timed_codes, encoders.checkpoint(tmp_path, Shape(config={"num_hidden_layers": 1})))
    assert written.dtype == torch.int8
    assert torch.equal(written, wanted)


def plan(tmp_path: Path) -> Any:
    return plan_of(Checkpoint(encoders.checkpoint(tmp_path, Shape(config={"num_hidden_layers": 1}))))


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, half = plan(tmp_path), torch.float16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    relative = replace(known, relative=torch.zeros(2, 23))
    odd = replace(known, blocks=(replace(known.blocks[0], head_dim=4),))
    for refused, device, dtype, what in (
        (known, CUDA, torch.float32, "float32"),
        (relative, CUDA, half, "relative positions"),
        (odd, CUDA, half, "multiples of 8"),
        (known, torch.device("cpu"), half, "NVIDIA"),
        (known, CUDA, half, "8.0"),
    ):
        why = library_attention.refusal(refused, device, dtype)
        assert why is not None
        assert what in why
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert library_attention.refusal(known, CUDA, half) is None
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, key, value: None)
    assert "factor" in str(library_attention.refusal(known, CUDA, half))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "has no torch.nn.attention.varlen" in str(library_attention.refusal(known, CUDA, half))


def test_a_plan_for_another_machine_is_refused_in_one_line(tmp_path: Path) -> None:
    known = replace(plan(tmp_path), attention="varlen")
    with pytest.raises(InputError, match=r"which cannot run here.*export again"):
        Encoder(known, torch.device("cpu"), torch.float16)
    Encoder(known, torch.device("cpu"), torch.float32)  # attention in float32 is ours


@pytest.mark.parametrize(
    ("ms", "kernel"), [([2.0, 1.0, 2.0, 4.0], "packed"), ([2.0, 1.0, 4.0, 2.0], "varlen"), ([1.0, 1.0, 1.0, 1.0], "packed")]
)
def test_the_plan_records_the_faster_kernel_and_its_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ms: list[float], kernel: str
) -> None:
    monkeypatch.setattr(library_attention, "refusal", lambda *_: None)
    lines: list[str] = []
    target, taken = SimpleNamespace(device="cpu", batch_sizes=(1, 2)), []
    request: Any = SimpleNamespace(target=target, buckets=(8, 64), engine="torch_kernels", log=lines.append)
    times: Iterator[float] = iter(ms)

    def time(work: Callable[[], object]) -> float:
        taken.append(work)
        return next(times)

    chosen = with_attention(plan(tmp_path), request, time)
    assert chosen.attention == kernel
    assert chosen.attention_ms == {"8": {"packed": ms[0], "varlen": ms[1]}, "12": {"packed": ms[2], "varlen": ms[3]}}
    assert len(lines) == 1
    path = tmp_path / "plan.safetensors"
    write_plan(chosen, path)
    assert (read_plan(path).attention, read_plan(path).attention_ms) == (chosen.attention, chosen.attention_ms)


def test_where_it_cannot_run_the_reason_is_logged(tmp_path: Path) -> None:
    lines: list[str] = []
    request: Any = SimpleNamespace(
        target=SimpleNamespace(device="cpu", batch_sizes=(1,)), buckets=(8,), engine="torch_kernels", log=lines.append
    )
    assert with_attention(plan(tmp_path), request, lambda work: pytest.fail("timed")).attention == "packed"
    assert len(lines) == 1
    assert "cpu" in lines[0]
