"""GPT-2 in int8 on our kernels against torch as people run it, on one GPU, in turns: texts that are read, and texts that get a token each.

    read    all logits of some texts of one length; Transformers' model, eager and under torch.compile(mode="max-autotune")
    step    one new token of each text behind so many others; `StepGpt`: Transformers' modules, keys and values in buffers of exactly that
            length, attention by torch's kernel (sdpa), eager and compiled, as gpt-fast does it

All have random weights, so that no answers are compared here; tests/export/fused/decoder compares ours with torch's int8 forward. Ours
keeps keys and values in pages of 16 tokens. What fails has a `reason` and stops nothing else; after `seconds` the rest is not begun.

The rehearsal runs the whole of it on a CPU: a tiny model, kernels in the interpreter, torch.compile with the backend aot_eager. Its times
mean nothing.

Shape suffixes: B texts, H heads, L tokens before, D dimension of a head.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu.measurements import BROKEN, line
from benchmarks.gpu.rivals import ON_GPU, REHEARSED, SECONDS, Torch
from benchmarks.gpu.squad import Machine
from benchmarks.gpu.timing import Gpu, in_turns
from export.fused.decoder.cache import SLOTS, Cache, Text
from export.fused.decoder.forward import Decoder
from export.fused.decoder.plan import DecoderBlock, DecoderPlan, Table
from export.fused.linears import Int8Linear
from export.fused.rows import Rows
from export.kernels.epilogue import Int8Weight
from export.kernels.launch import cdiv
from export.kernels.norm import Norm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

READ, STEP = ((1, 128), (8, 1024)), ((1, 512), (8, 512), (32, 1023))
"""(texts, tokens of each), and (texts, tokens before the new one)."""
ATLEAST = 1.5
"""How many times as fast as the fastest rival ours has to be."""
MODEL = "GPT-2"
Work = Callable[[], Any]


@dataclass(frozen=True)
class Gpt:
    """A GPT-2; the smallest one."""

    width: int = 768
    inner: int = 3072
    layers: int = 12
    heads: int = 12
    words: int = 50257
    positions: int = 1024

    @property
    def dimension(self) -> int:
        """D."""
        return self.width // self.heads


@dataclass(frozen=True)
class Rival:
    """One way to run GPT-2 in torch."""

    name: str
    dtype: torch.dtype
    compiled: bool


RIVALS = (
    Rival("compiled, fp16", torch.float16, True),
    Rival("compiled, bf16", torch.bfloat16, True),
    Rival("eager, fp16", torch.float16, False),
)
"""In the order in which they are measured."""


def random_decoder(gpt: Gpt, device: torch.device, seed: int = 0) -> DecoderPlan:
    """Returns a GPT-2 of random weights in int8, whose numbers stay in range; its head is tied and float."""
    random = torch.Generator(device).manual_seed(seed)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device) * 0.05

    def int8(name: str, outputs: int, inputs: int, input_scale: float) -> Int8Linear:
        codes = torch.randint(-127, 128, (outputs, inputs), generator=random, dtype=torch.int8, device=device)
        scale = torch.full((outputs,), 1 / (73 * inputs**0.5), device=device)  # outputs get a spread of about 1
        return Int8Linear(name, Int8Weight(codes, scale, floats(outputs)), input_scale)

    def norm() -> Norm:
        return Norm(1 + floats(gpt.width), floats(gpt.width), 1e-5)

    def block(number: int) -> DecoderBlock:
        projection, out = int8(f"{number}.qkv", 3 * gpt.width, gpt.width, 0.03), int8(f"{number}.out", gpt.width, gpt.width, 0.02)
        up, down = int8(f"{number}.up", gpt.inner, gpt.width, 0.03), int8(f"{number}.down", gpt.width, gpt.inner, 0.02)
        sizes = gpt.heads, gpt.heads, gpt.dimension, gpt.dimension**-0.5
        return DecoderBlock((projection,), out, None, up, down, *sizes, norm(), norm())

    table, blocks = Table(floats(gpt.words, gpt.width)), tuple(block(number) for number in range(gpt.layers))
    return DecoderPlan(table, floats(gpt.positions, gpt.width), None, "gelu_tanh", blocks, norm(), None, "head", {})


def eager_gpt(gpt: Gpt, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Returns the model of Transformers, of random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=gpt.words, n_positions=gpt.positions, n_embd=gpt.width, n_layer=gpt.layers, n_head=gpt.heads, n_inner=gpt.inner,
        bos_token_id=1, eos_token_id=2, attn_implementation="sdpa",
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval().to(device, dtype)


class StepGpt(nn.Module):
    """The modules of Transformers' GPT-2 for one new token of each text, keys and values of the tokens before it in buffers.

    Args:
        model: GPT2LMHeadModel.
        texts: B.
        before: Tokens before the new one, L.
    """

    def __init__(self, model: PreTrainedModel, texts: int, before: int) -> None:
        super().__init__()
        known: Any = model
        self.model, self.before, heads = model, before, known.config.n_head
        weight = known.transformer.wte.weight
        shape = (known.config.n_layer, 2, texts, heads, before + 1, known.config.n_embd // heads)
        self.register_buffer("cache", torch.randn(shape, device=weight.device).to(weight.dtype))

    def forward(self, tokens_B: Tensor) -> Tensor:
        """Returns the logits behind the new tokens, [B, V]; writes their keys and values."""
        known: Any = self.model
        core, heads, cache = known.transformer, known.config.n_head, self.cache
        assert isinstance(cache, Tensor), "a buffer"
        x = core.wte(tokens_B) + core.wpe.weight[self.before]
        for number, block in enumerate(core.h):
            query, key, value = block.attn.c_attn(block.ln_1(x)).unflatten(1, (3, heads, -1)).unbind(dim=1)
            cache[number, 0, :, :, self.before] = key
            cache[number, 1, :, :, self.before] = value
            attended = F.scaled_dot_product_attention(query[:, :, None], cache[number, 0], cache[number, 1])
            x = x + block.attn.c_proj(attended.flatten(1))
            x = x + block.mlp(block.ln_2(x))
        logits: Tensor = known.lm_head(core.ln_f(x))
        return logits


class Ours:
    """Our model, recorded for each shape.

    Args:
        gpt: Its sizes.
        machine: Where.
    """

    def __init__(self, gpt: Gpt, machine: Machine) -> None:
        self._gpt, self._machine = gpt, machine
        self._decoder = Decoder(random_decoder(gpt, machine.device), machine.device, machine.dtype, machine.tiles)

    def read(self, texts: int, tokens: int) -> Work:
        """Returns the pass over texts of one length."""
        ids = torch.randint(self._gpt.words, (texts * tokens,))
        position, start = torch.arange(tokens).repeat(texts), torch.arange(texts + 1) * tokens
        rows = Rows(ids, torch.zeros_like(ids), position, start.int(), start[:-1]).to(self._machine.device)
        return self._machine.record(lambda: self._decoder.forward(rows)).replay

    def step(self, texts: int, before: int) -> Work:
        """Returns the step of texts behind so many tokens, whose keys and values are zeros."""
        machine, every = self._machine, [Text() for _ in range(texts)]
        room = texts * cdiv(before + 1, SLOTS) * SLOTS
        cache = Cache(self._decoder.plan, machine.device, machine.dtype, room)
        cache.extended(every, [[1] * before] * texts)
        new = cache.extended(every, [[1]] * texts).to(machine.device)
        return machine.record(lambda: self._decoder.step(new, cache)).replay


def rival_work(rival: Rival, kind: str, shape: tuple[int, int], gpt: Gpt, machine: Machine, using: Torch) -> Work:
    """Returns a rival's pass over texts (read) or step (step), compiled by its first call where it is."""
    model, (texts, tokens) = eager_gpt(gpt, machine.device, rival.dtype), shape
    module: nn.Module = model if kind == "read" else StepGpt(model, texts, tokens)
    run: Any = using.compile(module) if rival.compiled else module
    ids = torch.randint(gpt.words, (texts, tokens) if kind == "read" else (texts,)).to(machine.device)

    def work() -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return run(input_ids=ids, use_cache=False).logits if kind == "read" else run(ids)

    return work


def compare(
    gpt: Gpt, machine: Machine, gpu: Gpu, using: Torch, shapes: dict[str, tuple[tuple[int, int], ...]], seconds: float = SECONDS
) -> dict[str, Any]:
    """Measures every rival; returns `times` as `benchmarks.gpu.rivals.compare` does, and no `rates`."""
    end = machine.clock() + seconds
    with torch.inference_mode():
        return {"times": list(_times(Ours(gpt, machine), gpt, machine, gpu, using, shapes, end)), "rates": []}


def _times(
    ours: Ours, gpt: Gpt, machine: Machine, gpu: Gpu, using: Torch, shapes: dict[str, tuple[tuple[int, int], ...]], end: float
) -> Iterator[dict[str, Any]]:
    for kind, some in shapes.items():
        for shape in some:
            named = f"{kind}, {shape[0]} x {shape[1]}"
            row: dict[str, Any] = {"shape": named, "ms": None, "ours_ms": None, "speedup": None, "reason": None}
            try:
                our_work = ours.read(*shape) if kind == "read" else ours.step(*shape)
            except BROKEN as error:
                yield from ({**row, "rival": rival.name, "reason": line(error)} for rival in RIVALS)
                continue
            for rival in RIVALS:
                try:
                    if machine.clock() > end:
                        raise TimeoutError("the time of the comparison was over")
                    work = rival_work(rival, kind, shape, gpt, machine, using)
                    work()  # compiles
                    times = {name: statistics.median(ms) for name, ms in in_turns({"ours": our_work, "rival": work}, gpu).items()}
                except (*BROKEN, TimeoutError) as error:
                    yield {**row, "rival": rival.name, "reason": line(error)}
                else:
                    speedup = round(times["rival"] / times["ours"], 4)
                    yield {**row, "rival": rival.name, "ms": times["rival"], "ours_ms": times["ours"], "speedup": speedup}


def on_gpu(machine: Machine, gpu: Gpu) -> dict[str, Any]:
    """Returns the comparison on the current GPU."""
    return compare(Gpt(), machine, gpu, ON_GPU, {"read": READ, "step": STEP})


def rehearsed(machine: Machine, gpu: Gpu) -> dict[str, Any]:
    """Returns the comparison of a tiny model, on the CPU."""
    gpt = Gpt(width=32, inner=64, layers=1, heads=1, words=50, positions=32)
    return compare(gpt, replace(machine, dtype=torch.float32), gpu, REHEARSED, {"read": ((2, 8),), "step": ((2, 8),)})
