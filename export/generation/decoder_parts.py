"""The parts of a decoder whose layers are built like Llama's, found by structure and proved by computing with them.

    x = embeddings[ids]
    in every layer   x += o(attention(rope(q(n1)), rope(k(n1)), v(n1)))     n1 = RMSNorm(x); in some models q and k of a head, too
                     x += down(act(gate(n2)) * up(n2))                      n2 = RMSNorm(x)
    logits           head(RMSNorm(x))

Names alone prove little: Granite has the same modules and multiplies their outputs by numbers of its own. `Parts.forward` therefore
computes as above, and a model with other logits is refused.

Left out: norms after a block (OLMo 2, Gemma), LayerNorm (GPT-2, OPT, Falcon), merged projections (Phi 3), mixtures of experts, rotary
embeddings of a part of a head, or of a base that depends on the length.

Shape suffixes: b rows, n tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foundation.core.errors import InputError
from foundation.models.config import most_tokens
from foundation.models.layers.low_rank_embedding import LowRankEmbedding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

UNLIMITED = 2048
"""Tokens of a model whose config.json gives no limit."""
TOLERANCE = 1e-3
"""Largest difference of logits, as a share of the largest: sums in another order reach about 1e-5."""
PROOF_TOKENS = 24
HEAD_UNIT = 16
"""GroupQueryAttention requires a head size that is a multiple of this."""
ACTIVATIONS: Mapping[str, Any] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}
SPELLINGS = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
"""Other names that Transformers has for an activation."""


class Otherwise(Exception):
    """The model has another structure; the message says where."""


@dataclass(frozen=True)
class Layer:
    """One layer; linear layers by their module path."""

    input_norm: Tensor
    """float32 [D]."""
    output_norm: Tensor
    """Norm of the feed-forward network's input, float32 [D]."""
    query: str
    key: str
    value: str
    out: str
    gate: str
    up: str
    down: str
    heads: int
    key_heads: int
    window: int | None = None
    """Size of the attention window, the current token included; None: all tokens."""
    query_norm: Tensor | None = None
    """Norm of each head, float32 [head size]; None where queries and keys are not normalized."""
    key_norm: Tensor | None = None


@dataclass(frozen=True)
class Parts:
    """A decoder."""

    modules: Mapping[str, nn.Module] = field(repr=False)
    """Its modules by path."""
    embeddings: str
    """The table of tokens."""
    projection: str | None
    """The layer that reads it, if the embeddings are in low rank."""
    head: str
    layers: tuple[Layer, ...]
    norm: Tensor
    """The last norm, float32 [D]."""
    epsilon: float
    """Epsilon of all norms."""
    activation: str
    """A key of `ACTIVATIONS`."""
    head_size: int
    scale: float
    """Factor of the attention scores."""
    cosine: Tensor
    """float32 [context, head size / 2]."""
    sine: Tensor

    @property
    def context(self) -> int:
        """Most tokens of a text."""
        return len(self.cosine)

    @property
    def tied(self) -> bool:
        """Whether the head multiplies by the embeddings."""
        modules: Any = self.modules
        return modules[self.head].weight is modules[self.embeddings].weight

    def forward(self, ids_bn: Tensor) -> Tensor:
        """Returns logits float32 [b, n, V] of token ids int64 [b, n]; written out, for proofs."""
        modules: Any = self.modules
        x = modules[self.embeddings].weight[ids_bn]
        x = x if self.projection is None else modules[self.projection](x)
        for layer in self.layers:
            read = _normalized(x, layer.input_norm, self.epsilon)
            x = x + modules[layer.out](self._attended(layer, *(modules[name](read) for name in (layer.query, layer.key, layer.value))))
            read = _normalized(x, layer.output_norm, self.epsilon)
            x = x + modules[layer.down](ACTIVATIONS[self.activation](modules[layer.gate](read)) * modules[layer.up](read))
        logits: Tensor = modules[self.head](_normalized(x, self.norm, self.epsilon))
        return logits

    def _attended(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, count = query.shape[:2]
        query, key, value = (one.view(rows, count, -1, self.head_size).transpose(1, 2) for one in (query, key, value))
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = _normalized(query, layer.query_norm, self.epsilon), _normalized(key, layer.key_norm, self.epsilon)
        query, key = self._rotated(query), self._rotated(key)
        key, value = (one.repeat_interleave(layer.heads // layer.key_heads, dim=1) for one in (key, value))
        distance = torch.arange(count)[:, None] - torch.arange(count)[None]
        seen = (distance >= 0) & (distance < (layer.window or count))
        scores = (query @ key.transpose(2, 3) * self.scale).masked_fill(~seen, -torch.inf)
        return (scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(rows, count, -1)

    def _rotated(self, x_bhns: Tensor) -> Tensor:
        first, second = x_bhns.chunk(2, dim=-1)
        cosine, sine = self.cosine[: x_bhns.shape[2]], self.sine[: x_bhns.shape[2]]
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def _normalized(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.pow(2).mean(dim=-1, keepdim=True) + epsilon).rsqrt() * weight


def parts_of(model: nn.Module, reader: str = "ONNX Runtime", unit: int = HEAD_UNIT) -> Parts:
    """Returns the parts of a decoder of Transformers, in eval mode and float32.

    Args:
        model: The decoder.
        reader: What it is written for, for messages.
        unit: What the size of a head has to be a multiple of, there.

    Raises:
        InputError: It is built otherwise, or computes otherwise.
    """
    known: Any = model
    kind = known.config.model_type
    try:
        parts = _read_parts(known, unit)
    except (Otherwise, AttributeError, TypeError) as error:
        why = f"{type(error.obj).__name__} has no {error.name}" if isinstance(error, AttributeError) and error.name else str(error)
        raise InputError("model", f"its {kind} layers differ from Llama's, which are written for {reader}: {why}") from error
    shape = (2, min(PROOF_TOKENS, parts.context))
    ids = torch.randint(known.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, found = known(input_ids=ids, use_cache=False).logits.float(), parts.forward(ids)
    apart = float((found - expected).abs().max() / expected.abs().max())
    if not apart <= TOLERANCE:
        raise InputError(
            "model",
            f"{kind} has the modules of Llama and computes otherwise (its logits are {apart:.1%} apart), so that "
            f"it is not written for {reader}",
        )
    return parts


def _read_parts(model: PreTrainedModel, unit: int) -> Parts:
    """Reads the parts; raises `Otherwise`, AttributeError or TypeError where one is missing or another is there."""
    paths = {module: path for path, module in model.named_modules()}
    base, config = model.base_model, model.config
    layers, first = list(base.layers), base.layers[0]
    attention = first.self_attn
    size, context = int(attention.head_dim), most_tokens(config) or UNLIMITED
    hidden = torch.zeros(1, 1, base.embed_tokens.embedding_dim)
    alone, whole = ([one[0].float() for one in base.rotary_emb(hidden, torch.arange(count)[None])] for count in (min(2, context), context))
    if not all(torch.equal(one, other[: len(one)]) for one, other in zip(alone, whole, strict=True)):
        raise Otherwise("its rotary embeddings depend on the length of the text")
    cosine, sine = whole
    if cosine.shape != (context, size):
        raise Otherwise(f"its rotary embeddings turn {cosine.shape[-1]} of the {size} numbers of a head")
    if size % unit:
        raise Otherwise(f"its heads have {size} numbers, and attention there takes multiples of {unit}")
    epsilons = {_epsilon(norm) for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)}
    if len(epsilons | {_epsilon(base.norm)}) != 1:
        raise Otherwise("its norms have different epsilons")
    act = str(config.hidden_act)
    activation = SPELLINGS.get(act, act)
    if activation not in ACTIVATIONS:
        raise Otherwise(f"its activation is {act}; {', '.join(ACTIVATIONS)} are written")
    words, low = base.embed_tokens, isinstance(base.embed_tokens, LowRankEmbedding)
    return Parts(
        modules=dict(model.named_modules()),
        embeddings=paths[words.table if low else words],
        projection=paths[words.projection] if low else None,
        head=paths[model.get_output_embeddings()],
        layers=tuple(_layer(layer, number, config, paths) for number, layer in enumerate(layers)),
        norm=_weight(base.norm),
        epsilon=_epsilon(base.norm),
        activation=activation,
        head_size=size,
        scale=float(attention.scaling),
        cosine=cosine[:, : size // 2],
        sine=sine[:, : size // 2],
    )


LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
HEAD_NORMS = ("q_norm", "k_norm")


def _layer(layer: Any, number: int, config: PreTrainedConfig, paths: Mapping[Any, str]) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    _only(layer, LAYER)
    _only(attention, {*PROJECTIONS, *HEAD_NORMS})
    _only(mlp, {*FEED_FORWARD, "act_fn"})
    norms = [_weight(getattr(attention, name)) if hasattr(attention, name) else None for name in HEAD_NORMS]
    if any(norm is not None and norm.shape != (attention.head_dim,) for norm in norms):
        raise Otherwise("its queries are normalized across heads")
    names = [paths[getattr(attention, name)] for name in PROJECTIONS] + [paths[getattr(mlp, name)] for name in FEED_FORWARD]
    query, key, value, out, gate, up, down = names
    return Layer(
        input_norm=_weight(layer.input_layernorm),
        output_norm=_weight(layer.post_attention_layernorm),
        query=query,
        key=key,
        value=value,
        out=out,
        gate=gate,
        up=up,
        down=down,
        heads=attention.q_proj.out_features // attention.head_dim,
        key_heads=attention.k_proj.out_features // attention.head_dim,
        window=_window(config, number),
        query_norm=norms[0],
        key_norm=norms[1],
    )


def _only(module: Any, names: set[str]) -> None:
    """Raises if a module has other parts than these."""
    others = sorted({name for name, _ in module.named_children()} - names)
    if others:
        raise Otherwise(f"{type(module).__name__} has {', '.join(others)}")


def _window(config: PreTrainedConfig, number: int) -> int | None:
    """Returns the tokens that the attention of a layer looks back on; None: all."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    return int(window) if kinds is None or kinds[number] == "sliding_attention" else None


def _weight(norm: Any) -> Tensor:
    weight: Tensor = norm.weight.detach().float()
    return weight


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon)
