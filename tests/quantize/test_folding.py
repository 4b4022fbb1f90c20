"""Which factors cancel: exactness for random factors in every family, and what blocks in modules small enough to see it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from types import CodeType

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from foundation.models.forward import forward
from quantize.folding import Fold, find_folds, rescale

SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": 30}
SPECIALS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**TEXT),
    "bert with ReLU": lambda: transformers.BertConfig(**TEXT, hidden_act="relu"),
    "distilbert": lambda: transformers.DistilBertConfig(vocab_size=30, dim=16, n_layers=2, n_heads=2, hidden_dim=24),
    "pre-norm roberta": lambda: transformers.RobertaPreLayerNormConfig(**TEXT),
    "albert": lambda: transformers.AlbertConfig(**TEXT, embedding_size=8),
    "deberta": lambda: transformers.DebertaV2Config(**TEXT),
    "modernbert": lambda: transformers.ModernBertConfig(**TEXT, **SPECIALS),
    "vit": lambda: transformers.ViTConfig(**SIZES, image_size=8, patch_size=4),
    "swin": lambda: transformers.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4),
}
EXACT = {  # how many folds hold a factor, of all
    "bert": (3, 7),
    "bert with ReLU": (5, 9),
    "distilbert": (4, 8),
    "pre-norm roberta": (7, 7),
    "albert": (2, 6),
    "deberta": (3, 7),
    "modernbert": (5, 10),
    "vit": (7, 7),
    "swin": (9, 9),
}


@functools.cache
def example(family: str) -> tuple[nn.Module, dict[str, Tensor], list[Fold]]:
    config = CONFIGS[family]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if family in ("vit", "swin"):
            model = transformers.AutoModelForImageClassification.from_config(config)
            features = {"pixel_values": torch.randn(2, 3, config.image_size, config.image_size)}
        else:
            model = transformers.AutoModelForSequenceClassification.from_config(config)
            ids = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 9, 2, 0]])
            features = {"input_ids": ids, "attention_mask": (ids != 0).long()}
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval(), features, find_folds(model, features, forward)


@pytest.mark.parametrize("family", CONFIGS)
def test_folds_are_found_without_names(family: str) -> None:
    folds = example(family)[2]
    assert (sum(fold.blocked is None for fold in folds), len(folds)) == EXACT[family]


def test_a_norm_that_the_residual_sum_reads_is_blocked() -> None:
    folds = {fold.producer: fold for fold in example("bert")[2]}
    attention = "bert.encoder.layer.0.attention"
    assert folds[f"{attention}.output.LayerNorm"].blocked == "add reads it"
    assert folds[f"{attention}.self.value"] == Fold(f"{attention}.self.value", (f"{attention}.output.dense",), None)
    assert not {f"{attention}.self.query", f"{attention}.self.key", "bert.encoder.layer.0.intermediate.dense"} & folds.keys()
    assert "bert.encoder.layer.0.intermediate.dense" in {fold.producer for fold in example("bert with ReLU")[2]}


def test_a_norm_before_attention_and_one_before_the_ffn_are_folded() -> None:
    folds = {fold.producer: fold.consumers for fold in example("vit")[2] if fold.blocked is None}
    layer = "vit.layers.1"
    assert folds[f"{layer}.layernorm_before"] == tuple(f"{layer}.attention.{name}_proj" for name in "qkv")
    assert folds[f"{layer}.layernorm_after"] == (f"{layer}.mlp.fc1",)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(CONFIGS)), st.integers(0, 2**31), st.floats(0, 3))
def test_random_factors_leave_the_function_as_it_was(family: str, seed: int, size: float) -> None:
    original, features, folds = example(family)
    model, generator = copy.deepcopy(original), torch.Generator().manual_seed(seed)
    for fold in folds:
        if fold.blocked is None:
            channels = len(model.get_submodule(fold.producer).get_parameter("weight"))
            rescale(model, fold, torch.exp(size * torch.randn(channels, generator=generator)))
    with torch.inference_mode():
        before, after = forward(original, features), forward(model, features)
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()


@pytest.mark.parametrize("family", CONFIGS)
def test_tracing_leaves_the_model_as_it_was(family: str) -> None:
    model, features, folds = example(family)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert find_folds(model, features, forward) == folds
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def names_in(code: CodeType) -> set[str]:
    """Returns the attributes that a function uses, those of the functions in it included."""
    return set(code.co_names).union(*(names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


class Net(nn.Module):
    """A norm and up to three linear layers of four channels, those that a function puts together."""

    def __init__(self, together: Callable[[Net, Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.norm = norm or nn.LayerNorm(4)
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
            for parameter in self.parameters():
                parameter.data += torch.randn_like(parameter)
        for name in {"norm", "a", "b", "c"} - names_in(together.__code__):
            delattr(self, name)
        self.dropout, self.together = nn.Dropout(), together
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.together(self, x)


def send(model: nn.Module, features: Mapping[str, Tensor]) -> object:
    return model(features["x"])


def folds_of(net: nn.Module) -> dict[str, Fold]:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    return {fold.producer: fold for fold in find_folds(net, {"x": x}, send)}


class RmsNorm(nn.Module):
    def __init__(self, offset: float) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.ones(4)), offset

    def forward(self, x: Tensor) -> Tensor:
        return (self.offset + self.weight) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Leak(nn.Module):
    """Its weight reaches negative inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, self.weight * x)


def written_over(net: Net, x: Tensor) -> Tensor:
    y = net.norm(x)
    z = net.a(y)
    y[..., 0] = 1
    return z + net.b(y)


def added_in_place(net: Net, x: Tensor) -> Tensor:
    y = net.norm(x)
    z = net.a(y)
    y += 1
    return z + net.b(y)


OPEN: dict[str, tuple[Callable[[Net, Tensor], Tensor], str, tuple[str, ...]]] = {
    "two readers": (lambda net, x: net.a(net.norm(x)) * net.b(net.norm(x)), "norm", ("a", "b")),
    "dropout and views": (lambda net, x: net.a(net.dropout(net.norm(x)).reshape(-1, 4).contiguous()[1:]), "norm", ("a",)),
    "linear to linear": (lambda net, x: net.b(net.a(x)), "a", ("b",)),
    "through a ReLU": (lambda net, x: net.b(torch.relu(net.a(x))), "a", ("b",)),
    "a product of positions": (lambda net, x: net.b(torch.softmax(x @ x.transpose(1, 2), -1) @ net.a(x)), "a", ("b",)),
    "halves put apart": (lambda net, x: net.b(net.a(x).view(2, 3, 2, 2).transpose(1, 2).transpose(1, 2).flatten(2)), "a", ("b",)),
    "a gate": (lambda net, x: net.c(nn.functional.silu(net.a(x)) * net.b(x)), "b", ("c",)),
    "a number": (lambda net, x: net.b(0.5 * net.a(x) * 3), "a", ("b",)),
    "the same layer twice": (lambda net, x: net.a(net.norm(net.a(net.norm(x)))), "norm", ("a",)),
}
BLOCKED: dict[str, tuple[Callable[[Net, Tensor], Tensor], str, str]] = {
    "a sum": (lambda net, x: net.a(net.norm(x)) + net.norm.eps + (lambda y: net.b(y) + y)(net.norm(x)), "norm", "add reads it"),
    "GELU": (lambda net, x: (lambda y: net.b(y) * net.c(nn.functional.gelu(y)))(net.a(x)), "a", "gelu reads it"),
    "ReLU6": (lambda net, x: (lambda y: net.b(y) * net.c(nn.functional.relu6(y)))(net.a(x)), "a", "relu6 reads it"),
    "its own gate": (lambda net, x: (lambda y: net.b(torch.relu(y) * y))(net.a(x)), "a", "mul reads it"),
    "its square": (lambda net, x: (lambda y: net.b(y * y) + net.c(y))(net.a(x)), "a", "mul reads it"),
    "a product that spreads": (lambda net, x: (lambda y: net.b(y[:, :1] * x) + net.c(y))(net.a(x)), "a", "mul reads it"),
    "another order": (lambda net, x: net.b(net.a(x)[..., [1, 0, 2, 3]]), "a", "b reads its channels in another order"),
    "positions as channels": (
        lambda net, x: net.b(net.a(x[:, [0, 1, 2, 0]]).transpose(1, 2)),
        "a",
        "b reads its channels in another order",
    ),
    "a product of channels": (
        lambda net, x: net.b(net.a(x)) + (x @ net.a(x).transpose(1, 2)).sum(-1, keepdim=True),
        "a",
        "matmul reads it",
    ),
    "attention to itself": (
        lambda net, x: (lambda y: net.b(nn.functional.scaled_dot_product_attention(y, y, y)) + net.c(y))(net.a(x)),
        "a",
        "scaled_dot_product_attention reads it",
    ),
    "a bias": (
        lambda net, x: (lambda y: net.c(y) + nn.functional.linear(x, net.b.weight, y[0, 0]))(net.a(x)),
        "a",
        "linear reads it",
    ),
    "another tensor too": (lambda net, x: net.b(net.a(x)) + net.b(x), "a", "b reads other tensors too"),
    "an answer": (lambda net, x: (lambda y: (y, net.b(y)))(net.a(x)), "a", "it is what the model answers"),  # type: ignore[dict-item]
    "written over": (written_over, "norm", "__setitem__ reads it"),
    "added to in place": (added_in_place, "norm", "add_ reads it"),
    "weights of attention": (lambda net, x: net.b(net.a(x)) * 0 + net.b(torch.softmax(net.a(x), -1)[..., :3] @ x), "a", "softmax reads it"),
}


@pytest.mark.parametrize("case", OPEN)
def test_what_lets_a_factor_through(case: str) -> None:
    together, producer, consumers = OPEN[case]
    net = Net(together)
    fold = folds_of(net)[producer]
    assert fold == Fold(producer, consumers, None)
    x = torch.randn(2, 3, 4)
    with torch.inference_mode():
        before = net(x)
        rescale(net, fold, torch.tensor([0.01, 3.0, 100.0, 1.0]))
        assert torch.allclose(net(x), before, rtol=1e-4, atol=1e-5 * float(before.abs().max()))


@pytest.mark.parametrize("case", BLOCKED)
def test_what_blocks_a_factor(case: str) -> None:
    together, producer, reason = BLOCKED[case]
    fold = folds_of(Net(together))[producer]
    assert fold.blocked == reason
    with pytest.raises(AssertionError):
        rescale(Net(together), fold, torch.ones(4))


def test_a_norm_is_known_by_what_it_does() -> None:
    def chain(net: Net, x: Tensor) -> Tensor:
        return net.a(net.norm(x))

    assert "norm" in folds_of(Net(chain, RmsNorm(0)))
    assert "norm" in folds_of(Net(chain, nn.RMSNorm(4)))
    assert "norm" not in folds_of(Net(chain, RmsNorm(1)))  # multiplies by 1 + w
    assert "norm" not in folds_of(Net(chain, Leak()))


def test_a_weight_of_two_modules_is_left_alone() -> None:
    net = Net(lambda net, x: net.b(net.a(x)) + net.c(x))
    net.c.weight = net.b.weight
    assert folds_of(net) == {}


class Experts(nn.Module):
    """Each token goes to the expert of its largest router output; an expert without tokens does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.up, self.down = (nn.ModuleList(nn.Linear(4, 4) for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x_NI = x.reshape(-1, 4)
        chosen_N, y_NI = self.router(x_NI).argmax(-1), torch.zeros(x_NI.shape)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            if bool((chosen_N == number).any()):
                y_NI[chosen_N == number] = down(torch.relu(up(x_NI[chosen_N == number])))
        return y_NI.view(x.shape)


class Block(nn.Module):
    """A norm read by one linear layer in a module of its own, and a norm read by a router and its experts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.second = nn.LayerNorm(4), nn.LayerNorm(4)
            self.mixer, self.experts = nn.Sequential(nn.Linear(4, 4)), Experts()
            for parameter in self.parameters():
                parameter.data += torch.randn_like(parameter)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.first(x))
        y: Tensor = x + self.experts(self.second(x))
        return y


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4))
def test_folds_hold_on_rows_that_the_trace_did_not_see(seed: int, traced: int) -> None:
    net, generator = Block(seed), torch.Generator().manual_seed(seed)
    rows = 3 * torch.randn(40, 2, 4, generator=generator)
    folds = {fold.producer: fold for fold in find_folds(net, {"x": rows[:traced]}, send)}
    with torch.inference_mode():
        before = net(rows)
        for fold in folds.values():
            if fold.blocked is None:
                rescale(net, fold, torch.exp(torch.randn(4, generator=generator)))
        assert torch.allclose(net(rows), before, rtol=1e-3, atol=1e-4 * float(before.abs().max()))
    assert folds["first"] == Fold("first", ("mixer.0",), None)


def test_an_expert_that_did_not_run_blocks_the_norm_that_it_may_read() -> None:
    net = Block(0)
    net.experts.router.bias.data = torch.tensor([0.0, 0.0, -1e6])
    rows = torch.randn(40, 2, 4, generator=torch.Generator().manual_seed(0))
    folds = {fold.producer: fold for fold in find_folds(net, {"x": rows}, send)}
    assert folds["second"].blocked == "experts.up.2 did not run and may read it"
    assert folds["experts.up.0"].blocked == "experts.up.2 did not run and may read it"
    assert folds["first"].blocked is None
    net.experts.router.bias.data = torch.zeros(3)
    folds = {fold.producer: fold for fold in find_folds(net, {"x": rows}, send)}
    assert folds["second"].consumers == ("experts.router", *(f"experts.up.{number}" for number in range(3)))
    assert folds["second"].blocked is None


def test_a_layer_that_is_run_by_its_weight_alone_is_reached() -> None:
    net = Net(lambda net, x: net.b(net.norm(x)) + nn.functional.linear(net.norm(x), net.a.weight, net.a.bias))
    assert folds_of(net)["norm"] == Fold("norm", ("b", "a"), None)


def test_no_hook_is_left_behind() -> None:
    net = Block(0)
    find_folds(net, {"x": torch.randn(2, 2, 4)}, send)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
