"""Programmatic dependent launch: a kernel starts while the last programs of the kernel before it still run. Capability 9.0 and later.

    griddepcontrol.wait                 blocks until the kernel before is complete, and what it wrote is visible
    griddepcontrol.launch_dependents    the next kernel may start once every program has come here, or has ended

https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol

A kernel that is launched so waits at its top, in every program, before it loads or stores anything in global memory. Then it lets the next
one start. Proof that a chain of such launches computes what plain launches compute:

    1. Kernel N loads and stores after its wait, so after kernel N - 1 is complete.
    2. Every program of kernel N - 1 has waited too, also one with nothing to do. So N - 1 is complete only after N - 2, and so on: all
       earlier kernels are complete. It does not matter which of them wrote what kernel N reads, or read what it overwrites.
    3. A kernel of torch in between is launched plainly: it starts when kernel N - 1 is complete, and kernel N waits for it.

No program waits for one that cannot run: when kernel N starts, every program of kernel N - 1 has its registers, its shared memory and, on
capability 10.0, its tensor memory, which it asks for before its wait. A kernel of a library that lets others start before it has its tensor
memory would break this; the build would hang where it records the pass.

Before the wait a product may prefetch the first bytes of its weight into the L2 cache. A prefetch returns nothing and changes no memory, so
the proof does not depend on what is prefetched. `benchmarks.gpu.dependent_code` checks all of this in the machine code.

Kernels have the constant DEPENDENT. Without it nothing of this file is in their machine code, and the interpreter never has it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST = (9, 0)
"""Compute capability that dependent launches need."""
LINE = tl.constexpr(128)
"""Bytes of a line of the cache."""
LINES = tl.constexpr(8)
"""Lines of each row that are prefetched: 1024 inputs in int8."""


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr) -> None:
    """Waits for the kernel before, and lets the next one start; nothing in a plain launch."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch_rows(matrix: tl.pointer_type, first: tl.tensor, rows: tl.tensor, length: tl.tensor, COUNT: tl.constexpr) -> None:
    """Prefetches the first bytes of some rows of a matrix of bytes [rows, length]: those from `first` on, COUNT at most."""
    row = tl.minimum(first + tl.arange(0, COUNT), rows - 1)
    at = tl.minimum(tl.arange(0, LINES) * LINE, length - 1)
    lines = matrix + (row.to(tl.int64)[:, None] * length + at[None, :])
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)], tl.int32, False, 1)
