"""How several processes divide the trainings of `tests/distill/processes.py`."""

from __future__ import annotations

from collections.abc import Mapping

from foundation.core.target import Parallel

PRUNED = ("pruned", "pruned in steps", "pruned inside")
LEARNED = ("joint", "joint channels", "moved units", "movement", "lasso")
"""Those that learn masks or zeros before they train."""
Plans = Mapping[str, tuple[Parallel, tuple[str, ...]]]
"""How trainings use two processes, and the cases that are trained so."""
USUAL = Parallel()
SHARDED = Parallel(strategy="fsdp2")
SHARED = Parallel(tensor=2)
SHARED_TOKENS = Parallel(tensor=2, sequence=True)
IN_CONTEXT = Parallel(context=2)
IN_STAGES = Parallel(pipeline=2)
INTERLEAVED = Parallel(pipeline=2, schedule="interleaved", microbatches=4)
PLANS: Mapping[str, Plans] = {
    "quick": {
        "ddp": (USUAL, ("finetune", "int8")),
        "fsdp2": (SHARDED, ("finetune",)),
        "tensor": (SHARED, ("adapters",)),
        "tensor with sequence": (SHARED_TOKENS, ("finetune",)),
        "context": (IN_CONTEXT, ("finetune",)),
        "pipeline": (IN_STAGES, ("finetune",)),
    },
    "slow": {
        "ddp": (
            USUAL,
            (
                *("dropout", "inside", "order", *PRUNED, "zeros", "eight bits"),
                *("joint", "joint channels", "moved units", "movement", "lasso", "answers", "relations"),
            ),
        ),
        "fsdp2": (SHARDED, ("dropout", "int8", "answers", "zeros", "inside", "order", *PRUNED, *LEARNED)),
        "little memory": (Parallel(strategy="fsdp2", offload=True, checkpointing="full"), ("dropout", "inside", "int8")),
        "products": (Parallel(checkpointing="selective"), ("dropout", "inside")),
        "lamb": (SHARDED, ("lamb", "lars")),
        "tensor": (
            SHARED,
            (
                *("finetune", "answers", "int8", "states", "divisible", "zeros", "fused", "lamb", "joint", "joint channels", "moved units"),
                *("int8 low rank", "int8 fused", "adapters fused", "pruned with adapters"),
            ),
        ),
        "tensor, little memory": (Parallel(tensor=2, checkpointing="full"), ("answers", "int8", "adapters")),
        "tensor, products": (Parallel(tensor=2, checkpointing="selective"), ("int8",)),
        "pipeline": (
            IN_STAGES,
            ("answers", "pruned", "pruned twice", "zeros", "fused", "lamb", "adafactor", "words", "grouped", "taught words", "parts"),
        ),
        "pipeline, interleaved": (INTERLEAVED, ("finetune", "fused", "grouped")),
        "pipeline, little memory": (Parallel(pipeline=2, checkpointing="full"), ("fused",)),
    },
    "groups": {
        "ddp": (
            USUAL,
            (
                *("negatives", "given negatives", "pairs", "hardest", "scored", "ranked", "towers"),
                *("taught pairs", "similar", "related pairs", "margins", "int8 pairs"),
                *("joined negatives", "joined pairs", "joined similar"),
            ),
        ),
        "fsdp2": (SHARDED, ("negatives", "pairs", "towers", "taught pairs", "similar", "relations", "joined pairs", "joined similar")),
        "tensor": (SHARED, ("relations", "joined pairs")),
    },
    "groups in three": {
        "ddp of three": (USUAL, ("negatives", "similar", "relations", "related pairs", "joined negatives")),
    },
    "groups in four": {
        "ddp of four": (USUAL, ("negatives", "towers", "similar", "relations")),
        "tensor and ddp": (SHARED, ("negatives", "pairs", "relations")),
        "context and ddp": (IN_CONTEXT, ("negatives", "pairs")),
    },
    "tokens": {
        "tensor with sequence": (SHARED_TOKENS, ("uneven", "answers", "divisible", "zeros", "words", "grouped", "taught words")),
        "tensor with sequence, little memory": (Parallel(tensor=2, sequence=True, checkpointing="full"), ("finetune", "grouped")),
        "tensor with sequence, products": (Parallel(tensor=2, sequence=True, checkpointing="selective"), ("words",)),
    },
    "tokens in four": {
        "tensor with sequence and ddp": (SHARED_TOKENS, ("finetune", "words", "grouped")),
        "tensor with sequence and fsdp2": (Parallel(tensor=2, sequence=True, strategy="fsdp2"), ("finetune", "answers", "grouped")),
        "tensor of four with sequence": (Parallel(tensor=4, sequence=True), ("words",)),
    },
    "tokens in eight": {"mesh": (Parallel(mesh=(2, 4)), ("words", "taught words"))},
    "context": {
        "context": (
            IN_CONTEXT,
            (
                *("uneven", "answers", "pruned", "zeros", "int8", "adapters", "lamb"),
                *("words", "grouped", "taught words"),
            ),
        ),
        "context, sharded": (Parallel(context=2, strategy="fsdp2"), ("uneven", "answers", "int8", "words", "lamb")),
        "context, little memory": (Parallel(context=2, strategy="fsdp2", offload=True, checkpointing="full"), ("finetune", "grouped")),
        "context, products": (Parallel(context=2, checkpointing="selective"), ("words",)),
    },
    "context in four": {
        "context and ddp": (IN_CONTEXT, ("finetune", "answers", "grouped")),
        "context and fsdp2": (Parallel(context=2, strategy="fsdp2"), ("finetune", "grouped", "int8")),
        "context of four": (Parallel(context=4), ("uneven", "words")),
    },
    "experts": {
        "experts": (Parallel(experts=2), ("mixture", "mixture in parts", "taught mixture", "pruned mixture")),
        "experts, sharded": (Parallel(experts=2, strategy="fsdp2"), ("mixture", "taught mixture")),
        "experts, little memory": (Parallel(experts=2, strategy="fsdp2", checkpointing="full"), ("mixture",)),
    },
    "experts in four": {
        "experts and ddp": (Parallel(experts=2), ("mixture", "mixture in parts")),
        "experts and fsdp2": (Parallel(experts=2, strategy="fsdp2"), ("mixture",)),
        "experts of four": (Parallel(experts=4), ("mixture",)),
    },
    "four": {
        "tensor and ddp": (SHARED, ("finetune", "answers", "divisible", "fused", "int8", "adapters")),
        "tensor and fsdp2": (
            Parallel(tensor=2, strategy="fsdp2"),
            ("finetune", "answers", "divisible", "fused", "lamb", "int8", "int8 low rank", "int8 fused", "adapters", "adapters fused"),
        ),
        "pipeline and ddp": (IN_STAGES, ("finetune", "answers", "words")),
        "pipeline of four": (Parallel(pipeline=4), ("words",)),
        "tensor and offload": (Parallel(tensor=2, strategy="fsdp2", offload=True, checkpointing="selective"), ("answers",)),
    },
}
