#!/usr/bin/env bash
# Transformers 5.23.0: NLLB-MoE runs two of its experts, whatever the router chooses. The guess was that every token goes through the two experts
# that the router weights, as in the paper and as in Switch Transformers, whose layers look alike: y = g_1 E_1(x) + g_2 E_2(x).
#
# Seen (2026-11-30): the router returns a mask of 0 and 1 for each token and expert, and the experts take it for numbers of experts. Whatever is 1
# counts as expert 1, whatever is 0 as expert 0: of 8 experts the first runs 7 times for each token, the second once, the other six never. Their
# weights can be anything. The second weight of the router goes to expert 0. The output of a layer with random weights is off by more than 100 % of
# its size, with no warning, also in training. Of 2 experts, expert 1 answers for both. Switch Transformers is right to seven digits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -qq torch==2.13.0 transformers==5.23.0
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON' 2> /dev/null
import torch
from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration, SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

EXPERTS, TOKENS = 8, 20


def layer_of(kind, config):
    """The first sparse layer of a model that is drawn."""
    torch.manual_seed(0)
    model = kind(config).eval()
    return next(module for module in model.modules() if type(module).__name__.endswith("SparseMLP"))


def runs(layer, states):
    """The output of a layer, and how many tokens each expert read."""
    read = [0] * EXPERTS
    hooks = [
        layer.experts[f"expert_{number}"].register_forward_hook(
            lambda module, given, answer, number=number: read.__setitem__(number, read[number] + len(given[0]))
        )
        for number in range(EXPERTS)
    ]
    answer = layer(states)[0]
    [hook.remove() for hook in hooks]
    return answer, read


@torch.no_grad()
def main():
    sizes = {"num_experts": EXPERTS, "vocab_size": 64, "d_model": 16, "expert_capacity": 64}
    nllb = NllbMoeConfig(
        **sizes, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_sparse_step=1, decoder_sparse_step=1, moe_token_dropout=0.0,
    )
    layer, states = layer_of(NllbMoeForConditionalGeneration, nllb), torch.randn(1, TOKENS, 16)
    _, gates, _ = layer.router(states[0])
    answer, read = runs(layer, states)
    chosen = (gates > 0).sum(dim=0).tolist()
    expected = sum(gates[:, number, None] * layer.experts[f"expert_{number}"](states[0]) for number in range(EXPERTS))
    error = ((answer - expected).norm() / expected.norm()).item()
    print("NLLB-MoE: tokens with a weight for each expert ", chosen)
    print("          tokens that each expert read         ", read)
    print(f"          error of the output                    {error:.0%}")
    for number in range(2, EXPERTS):
        for weight in layer.experts[f"expert_{number}"].parameters():
            weight.fill_(1e6)
    same = torch.equal(layer(states)[0], answer)
    print("          with other weights in experts 2 to 7   ", "the same output" if same else "another output")
    assert sum(chosen) > TOKENS and min(chosen[2:]) > 0, chosen
    assert read == [TOKENS * (EXPERTS - 1), TOKENS, 0, 0, 0, 0, 0, 0] and same and error > 1, (read, error)

    switch = SwitchTransformersConfig(**sizes, d_ff=32, d_kv=8, num_heads=2, num_layers=1, num_decoder_layers=1, num_sparse_encoder_layers=1)
    layer = layer_of(SwitchTransformersForConditionalGeneration, switch)
    chosen, gates, _ = layer.router(states)
    answer, read = runs(layer, states)
    expected = sum(chosen[0, :, number, None] * gates[0] * layer.experts[f"expert_{number}"](states[0]) for number in range(EXPERTS))
    error = ((answer - expected).norm() / expected.norm()).item()
    print("Switch:   tokens that each expert read         ", read)
    print(f"          error of the output                    {error:.0e}")
    assert read == chosen[0].sum(dim=0).tolist() and error < 1e-5, (read, error)


main()
PYTHON
