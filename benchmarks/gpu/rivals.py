"""BERT-large in int8 on our kernels against torch as people run it, on one GPU, in turns.

    eager              Transformers' model, attention by torch's kernel (sdpa), rows of one length
    compiled           the same under torch.compile(mode="max-autotune")
    compiled, packed   the same weights over rows without padding, attention by torch.nn.attention.varlen, compiled
    torchao int8       the packed one after Int8DynamicActivationInt8WeightConfig of torchao, compiled; bf16 between the layers

    TensorRT           our exported Q/DQ graph of the same sizes, and the float one, both with fp16 (`tensorrt_rival`)
    varlen             attention alone, torch.nn.attention.varlen against our packed kernel, for the same rows and those of SQuAD's lengths

All have random weights. `rates` counts rows per second of SQuAD's lengths in the batches of `benchmarks.gpu.squad`, filled up to one size,
so that each is compiled and recorded once. What fails has a `reason` and stops nothing else; after `seconds` the rest is not begun.

The rehearsal runs the whole of it on a CPU: a tiny model, kernels in the interpreter, torch.compile with the backend aot_eager, attention
with a mask. Its times mean nothing.

Shape suffixes: T tokens of all rows, B sequences, H heads, D dimension of a head.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu import tensorrt_rival
from benchmarks.gpu.against_torch import eager_bert
from benchmarks.gpu.measurements import BROKEN, line
from benchmarks.gpu.squad import SEQUENCES, TOKENS, Bert, Machine, batches_of, packed, random_plan
from benchmarks.gpu.timing import Gpu, in_turns
from benchmarks.gpu.verdict import Verdict
from export.fused.forward import Encoder
from export.fused.graphs import Graphs, Size
from export.fused.rows import Limits, Rows, filled
from export.kernels import attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPES = ((32, 384), (32, 128), (1, 128))
"""(rows, tokens)."""
SECONDS = 600.0
VARLEN = "torch varlen"
APART = 0.01
"""Most that two kernels of attention may differ for numbers with a spread of 1."""
ATLEAST = 1.0
"""How many times as fast as the fastest rival ours has to be."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""Queries, keys and values [T, H, D], where sequences begin int32 [B + 1], and the longest sequence, to [T, H, D]."""
Pass = Callable[[Rows], Tensor]
"""Rows on the device to logits [B, C]."""
Compile = Callable[[nn.Module], Callable[..., Tensor]]


@dataclass(frozen=True)
class Rival:
    """One way to run BERT in torch."""

    name: str
    dtype: torch.dtype
    compiled: bool
    packed: bool
    torchao: bool = False


RIVALS = (
    Rival("compiled, packed, fp16", torch.float16, True, True),
    Rival("eager, fp16", torch.float16, False, False),
    Rival("compiled, fp16", torch.float16, True, False),
    Rival("torchao int8, packed", torch.bfloat16, True, True, True),
    Rival("compiled, packed, bf16", torch.bfloat16, True, True),
    Rival("compiled, bf16", torch.bfloat16, True, False),
)
"""In the order in which they are measured."""


@dataclass(frozen=True)
class Torch:
    """How torch runs the rivals."""

    attend: Attend
    compile: Compile


class PackedBert(nn.Module):
    """The modules of Transformers' BERT over rows without padding.

    Args:
        model: BertForSequenceClassification.
        attend: Attention within each sequence.
    """

    def __init__(self, model: PreTrainedModel, attend: Attend) -> None:
        super().__init__()
        self.model, self.attend = model, attend

    def forward(self, word_T: Tensor, kind_T: Tensor, position_T: Tensor, start_B: Tensor, first_B: Tensor) -> Tensor:
        """Returns the logits, [B, C]."""
        bert: Any = self.model.bert
        tables, longest = bert.embeddings, bert.config.max_position_embeddings
        x = tables.word_embeddings(word_T) + tables.token_type_embeddings(kind_T) + tables.position_embeddings(position_T)
        x = tables.LayerNorm(x)
        for layer in bert.encoder.layer:
            own, heads = layer.attention.self, bert.config.num_attention_heads
            query, key, value = (part(x).unflatten(1, (heads, -1)) for part in (own.query, own.key, own.value))
            attended = self.attend(query, key, value, start_B, longest).flatten(1)
            x = layer.attention.output.LayerNorm(layer.attention.output.dense(attended) + x)
            x = layer.output.LayerNorm(layer.output.dense(F.gelu(layer.intermediate.dense(x))) + x)
        classifier: Any = self.model.classifier
        logits: Tensor = classifier(torch.tanh(bert.pooler.dense(x.index_select(0, first_B))))
        return logits


def by_varlen(query: Tensor, key: Tensor, value: Tensor, start_B: Tensor, longest: int) -> Tensor:
    """Attention of torch's flash kernel; float16 or bfloat16 on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    attended = varlen_attn(query, key, value, start_B, start_B, longest, longest)
    assert isinstance(attended, Tensor), "varlen_attn returns a pair only where the logarithms of the sums are asked for"
    return attended


def by_mask(query: Tensor, key: Tensor, value: Tensor, start_B: Tensor, longest: int) -> Tensor:
    """Attention over all tokens with a mask: for the rehearsal, and to compare with."""
    sequence_T = torch.searchsorted(start_B, torch.arange(len(query), device=query.device, dtype=start_B.dtype), right=True)
    same = sequence_T[:, None] == sequence_T[None, :]
    query_HTD, key_HTD, value_HTD = (part.transpose(0, 1) for part in (query, key, value))
    return F.scaled_dot_product_attention(query_HTD, key_HTD, value_HTD, attn_mask=same).transpose(0, 1)


ON_GPU = Torch(by_varlen, lambda module: torch.compile(module, mode="max-autotune", dynamic=False, fullgraph=True))
REHEARSED = Torch(by_mask, lambda module: torch.compile(module, backend="aot_eager", dynamic=False, fullgraph=True))


def pass_of(rival: Rival, bert: Bert, machine: Machine, using: Torch) -> Pass:
    """Returns the pass of a rival with weights of its own.

    Raises:
        ModuleNotFoundError: torchao is not installed.
    """
    model = eager_bert(bert, machine.device, rival.dtype)
    module: nn.Module = PackedBert(model, using.attend) if rival.packed else model
    if rival.torchao:
        torchao: Any = importlib.import_module("torchao.quantization")  # an optional package
        torchao.quantize_(module, torchao.Int8DynamicActivationInt8WeightConfig())
    run: Any = using.compile(module) if rival.compiled else module

    def over_packed(rows: Rows) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        logits: Tensor = run(rows.word, rows.kind, rows.position, rows.start, rows.first)
        return logits

    def over_one_length(rows: Rows) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        logits: Tensor = run(input_ids=rows.word.view(rows.sequences, -1)).logits
        return logits

    return over_packed if rival.packed else over_one_length


class Ours:
    """Our model, and rows for all.

    Args:
        bert: Its sizes.
        machine: Where.
        shapes: What is timed with rows of one length.
        lengths: Tokens of the rows that are counted per second.
        size: Room of a batch of those.
    """

    def __init__(self, bert: Bert, machine: Machine, shapes: Sequence[tuple[int, int]], lengths: Sequence[int], size: Size) -> None:
        plan = random_plan(bert, machine.device)
        self._encoder, self._machine, self._size = Encoder(plan, machine.device, machine.dtype, machine.tiles), machine, size
        random = np.random.default_rng(0)
        self.by_shape = {shape: self._packed(list(random.integers(0, bert.words, shape))).to(machine.device) for shape in shapes}
        ids = [random.integers(0, bert.words, length) for length in lengths]
        self.batches = [self._packed([ids[row] for row in rows]) for rows in batches_of(lengths, size.tokens, size.sequences)]
        self.rows = len(lengths)

    @property
    def limits(self) -> Limits:
        """Bounds of the ids."""
        return self._encoder.limits

    def first_batch(self) -> Rows:
        """Returns a batch of rows of several lengths, on the device."""
        return self.batches[0].to(self._machine.device)

    def work(self, rows: Rows) -> Callable[[], Tensor]:
        """Returns our pass over rows, recorded."""
        return self._machine.record(lambda: self._encoder.forward(rows)).replay

    def recorded(self) -> Pass:
        """Returns our pass over batches."""
        return Graphs(self._encoder.forward, (self._size,), self._machine.device, self._machine.record)

    def rate(self, forward: Pass, rounds: int = 3) -> float:
        """Returns how many rows per second a pass answers: the median of the rounds, the first of which is not counted."""
        rates = []
        for _ in range(rounds + 1):
            self._machine.wait()
            began = self._machine.clock()
            for batch in self.batches:
                forward(batch).cpu()
            self._machine.wait()
            rates.append(self.rows / (self._machine.clock() - began))
        return statistics.median(rates[1:])

    def filling(self, forward: Pass) -> Pass:
        """Returns a pass that fills batches up to one size and copies them to the device."""
        return lambda rows: forward(filled(rows, self._size.tokens, self._size.sequences).to(self._machine.device))

    def _packed(self, ids: Sequence[np.ndarray]) -> Rows:
        return packed(ids, self._encoder)


def compare(ours: Ours, bert: Bert, machine: Machine, gpu: Gpu, using: Torch = ON_GPU, seconds: float = SECONDS) -> dict[str, Any]:
    """Measures every rival.

    Returns:
        `times`, for a rival and a shape `rival`, `shape`, `ms`, `ours_ms`, `speedup`, `reason`; and `rates`, for a rival over packed rows
        `rival`, `per_s`, `ours_per_s`, `speedup`, `reason`.
    """
    end = machine.clock() + seconds
    with torch.inference_mode():
        works = {shape: ours.work(rows) for shape, rows in ours.by_shape.items()}
        our_rate = ours.rate(ours.recorded())
        named = {" x ".join(map(str, shape)): rows for shape, rows in ours.by_shape.items()} | {"lengths of SQuAD": ours.first_batch()}
        found: dict[str, Any] = {"times": list(attention_alone(named, bert, machine, gpu, using)), "rates": []}
        for rival in RIVALS:
            try:
                if machine.clock() > end:
                    raise TimeoutError(f"the {seconds:.0f} seconds of the comparison were over")
                forward = pass_of(rival, bert, machine, using)
            except (*BROKEN, ImportError, TimeoutError) as error:
                found["times"] += [_timed(rival.name, shape, None, None, line(error)) for shape in works]
                found["rates"] += [_rated(rival, None, our_rate, line(error))] if rival.packed else []
                continue
            found["times"] += list(_times(rival, forward, ours, works, gpu))
            if rival.packed:
                found["rates"].append(_rate_of(rival, forward, ours, our_rate))
        found["times"] += list(by_tensorrt(works, bert, machine, gpu, machine.clock() > end))
    return found


def by_tensorrt(works: Mapping[tuple[int, int], Any], bert: Bert, machine: Machine, gpu: Gpu, late: bool) -> Iterator[dict[str, Any]]:
    """Yields a row of `times` for every plan of TensorRT and every shape of ours.

    Args:
        works: Our passes by shape.
        bert: Sizes.
        machine: Where.
        gpu: Takes the times.
        late: Whether no time is left.
    """
    reason = tensorrt_rival.absence() or ("no time was left" if late else None)
    measured = set()
    try:
        for name, theirs, note in () if reason else tensorrt_rival.answering(bert, tuple(works), machine):
            measured.add(name)
            for shape, work in works.items():
                times = {side: statistics.median(ms) for side, ms in in_turns({"ours": work, "rival": theirs[shape]}, gpu).items()}
                yield _timed(name, shape, times["rival"], times["ours"], note)
    except (*BROKEN, ImportError) as error:
        reason = line(error)
    for name in tensorrt_rival.PRECISIONS:
        if name not in measured:
            yield from (_timed(name, shape, None, None, reason) for shape in works)


def attention_alone(named: Mapping[str, Rows], bert: Bert, machine: Machine, gpu: Gpu, using: Torch) -> Iterator[dict[str, Any]]:
    """Yields a row of `times` for rows by name: packed attention of one layer, float type and outputs as the machine's.

    Args:
        named: Rows on the device.
        bert: Sizes.
        machine: Where.
        gpu: Takes the times.
        using: How torch attends.
    """
    dimension = bert.width // bert.heads
    for name, rows in named.items():
        tokens, longest = len(rows.word), bert.positions
        q, k, v, out = (torch.randn(tokens, bert.heads, dimension, device=machine.device).to(machine.dtype) for _ in range(4))
        scores, lengths = attention.Scores(dimension**-0.5), [longest] * rows.sequences
        ours = attention.launch((q, k, v), rows.start, lengths, scores, out)
        row: dict[str, Any] = {"rival": VARLEN, "shape": f"attention, {name}", "ms": None, "ours_ms": None, "speedup": None, "reason": None}
        try:
            ours.run()
            apart = float((using.attend(q, k, v, rows.start, longest).float() - out.float()).abs().max())
            works: dict[str, Callable[[], Any]] = {"ours": ours.run, "rival": partial(using.attend, q, k, v, rows.start, longest)}
            times = {work: statistics.median(ms) for work, ms in in_turns(works, gpu).items()}
            row |= {"ms": times["rival"], "ours_ms": times["ours"], "speedup": round(times["rival"] / times["ours"], 4)}
            row["reason"] = None if apart <= APART else f"the outputs differ by {apart:.2g}"
        except BROKEN as error:
            row["reason"] = line(error)
        yield row


def _times(rival: Rival, forward: Pass, ours: Ours, works: Mapping[tuple[int, int], Any], gpu: Gpu) -> Iterator[dict[str, Any]]:
    for shape, work in works.items():
        rows = ours.by_shape[shape]
        try:
            forward(rows)  # compiles
            times = {name: statistics.median(ms) for name, ms in in_turns({"ours": work, "rival": lambda: forward(rows)}, gpu).items()}  # noqa: B023
        except BROKEN as error:
            yield _timed(rival.name, shape, None, None, line(error))
        else:
            yield _timed(rival.name, shape, times["rival"], times["ours"], None)


def _rate_of(rival: Rival, forward: Pass, ours: Ours, our_rate: float) -> dict[str, Any]:
    try:
        return _rated(rival, ours.rate(ours.filling(forward)), our_rate, None)
    except BROKEN as error:
        return _rated(rival, None, our_rate, line(error))


def _timed(rival: str, shape: tuple[int, int], ms: float | None, ours_ms: float | None, reason: str | None) -> dict[str, Any]:
    speedup = None if ms is None or ours_ms is None else round(ms / ours_ms, 4)
    return {"rival": rival, "shape": " x ".join(map(str, shape)), "ms": ms, "ours_ms": ours_ms, "speedup": speedup, "reason": reason}


def _rated(rival: Rival, per_s: float | None, ours: float, reason: str | None) -> dict[str, Any]:
    speedup = None if per_s is None else round(ours / per_s, 4)
    return {"rival": rival.name, "per_s": per_s, "ours_per_s": round(ours, 1), "speedup": speedup, "reason": reason}


def verdicts(found: Mapping[str, Any], model: str = "BERT-large", at_least: float = ATLEAST) -> list[Verdict]:
    """Returns a line for every row; the fastest rival of each shape, and of the packed rows, has a limit: `at_least` times its speed."""
    rows = [(row["shape"], row) for row in found["times"]] + [("rows per second, lengths of SQuAD", row) for row in found["rates"]]
    lines = []
    for what in dict.fromkeys(name for name, _ in rows):
        some = [row for name, row in rows if name == what]
        fastest = min((row["speedup"] for row in some if row["speedup"] is not None), default=None)
        if fastest is None:
            lines.append(Verdict(model, f"{what}, against the fastest rival", None, at_least, reason="no rival was measured"))
        for row in some:
            judged = fastest is not None and row["speedup"] == fastest
            lines.append(
                Verdict(model, f"{what}, against {row['rival']}", row["speedup"], at_least if judged else None, reason=row["reason"])
            )
    return lines


def table(found: Mapping[str, Any], told: Sequence[Verdict] | None = None) -> str:
    """Returns both tables and the verdicts in words; by default those of `verdicts`."""
    lines = [f"{'rival':26}{'rows x tokens':>34}{'rival':>12}{'ours':>12}{'times':>8}  verdict"]
    words = {(line.line.partition(", against ")[0], line.line.partition(", against ")[2]): line.word for line in told or verdicts(found)}
    for what, row, theirs, our in [
        *((row["shape"], row, row["ms"], row["ours_ms"]) for row in found["times"]),
        *(("rows per second, lengths of SQuAD", row, row["per_s"], row["ours_per_s"]) for row in found["rates"]),
    ]:
        numbers = "".join(
            f"{'' if value is None else format(value, '.3f'):>{width}}" for value, width in ((theirs, 12), (our, 12), (row["speedup"], 8))
        )
        lines.append(f"{row['rival']:26}{what:>34}{numbers}  {row['reason'] or words[(what, row['rival'])]}")
    return "\n".join(lines)


def on_gpu(machine: Machine, gpu: Gpu, lengths: Sequence[int], seconds: float = SECONDS) -> dict[str, Any]:
    """Returns the comparison on the current GPU."""
    bert = Bert()
    return compare(Ours(bert, machine, SHAPES, lengths, Size(TOKENS, SEQUENCES)), bert, machine, gpu, ON_GPU, seconds)


def rehearsed(machine: Machine, gpu: Gpu) -> dict[str, Any]:
    """Returns the comparison of a tiny model, on the CPU."""
    bert = Bert(width=32, inner=64, layers=1, heads=1, words=50, positions=16)
    return compare(Ours(bert, machine, ((2, 8), (1, 4)), (3, 16, 9, 4), Size(24, 2)), bert, machine, gpu, REHEARSED)
