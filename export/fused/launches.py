"""How the kernels of a pass are launched: plainly, or dependent on each other (`export.kernels.dependent_launch`).

    plain        a kernel starts when the one before it is complete
    dependent    its programs start while the last ones of the kernel before still run, and wait for them

Both have the same bits. Which of the two a plan takes is measured where the plan is built, on recorded passes: for each batch size of the
target and each length. The kind with the smaller mean of time / time of plain launches is taken, so that every shape counts alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from export.fused.graphs import Record
from export.fused.layers import Tiles
from export.kernels.dependent_launch import LEAST

KINDS = ("plain", "dependent")
LEAST_CUDA = (12, 3)
"""Release of CUDA whose graphs keep dependent launches that are recorded."""
Work = Callable[[], object]
Time = Callable[[Work], float]
"""Returns how long some work takes, in milliseconds."""


@dataclass(frozen=True)
class Launches:
    """How the kernels of a plan are launched."""

    dependent: bool = False
    """Whether dependent launches were measured to be faster."""
    ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Times of a recorded pass in milliseconds, by its shape and by the kind of its launches; empty where they were not compared."""
    reason: str | None = None
    """Why dependent launches are not taken, where times do not say it."""

    def on(self, device: torch.device) -> bool:
        """Whether kernels are launched dependent on a device; elsewhere than on such GPUs the same kernels are launched plainly."""
        return self.dependent and refusal(device) is None

    @property
    def document(self) -> dict[str, Any]:
        """The JSON of a plan; `Launches(**document)` reads it."""
        return asdict(self)

    @property
    def reported(self) -> dict[str, str]:
        """What the report of an engine says of it; nothing where no GPU was there to choose."""
        return {"launches": self.line} if self.ms or self.reason is not None else {}

    @property
    def line(self) -> str:
        """The choice and its cause."""
        kind = KINDS[self.dependent]
        times = "; ".join(f"{shape}: {ms['dependent']:.3f} ms, plain {ms['plain']:.3f} ms" for shape, ms in self.ms.items())
        causes = [*([] if self.reason is None else [self.reason]), *([f"dependent {times}"] if times else [])]
        return f"{kind} ({'; '.join(causes)})" if causes else kind


class Compared(Protocol):
    """A pass of one shape, recorded with both kinds of launches."""

    shape: str
    """Of the report: rows x tokens."""

    def differs(self) -> str | None:
        """Returns which answers differ, in words; None where all bits are equal."""

    def works(self) -> Mapping[str, Work]:
        """Returns what runs the recording of each of `KINDS`."""


Passes = Callable[[torch.device, torch.dtype, Sequence[tuple[int, int]], Tiles | None, Record], Iterable[Compared]]
"""Records passes: on a device, with a float type, of rows x tokens, with tiles, by a recorder."""


def refusal(device: torch.device) -> str | None:
    """Returns in one line why kernels cannot be launched dependent on a device; None where they can."""
    if device.type != "cuda":
        return f"they need an NVIDIA GPU, and the device is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST:
        return f"they need compute capability 9.0, and this GPU has {capability[0]}.{capability[1]}"
    release = re.match(r"(\d+)\.(\d+)", str(torch.version.cuda))
    if release is None or (int(release[1]), int(release[2])) < LEAST_CUDA:
        return f"recording them needs CUDA 12.3, and this torch has {torch.version.cuda}"
    return None


def fastest(passes: Iterable[Compared], time: Time) -> Launches:
    """Returns the faster kind of launches with all times; plain ones where answers differ, before or after the times are taken.

    Args:
        passes: At least one, of different shapes.
        time: Takes the times.
    """
    ms: dict[str, dict[str, float]] = {}
    for one in passes:
        reason = one.differs()
        if reason is None:
            ms[one.shape] = {kind: round(time(work), 5) for kind, work in one.works().items()}
            reason = one.differs()
        if reason is not None:
            return Launches(reason=f"dependent ones changed {reason} of {one.shape}", ms=ms)
    shares = [times["dependent"] / times["plain"] for times in ms.values()]
    return Launches(sum(shares) < len(shares), ms)


def differing(plain: Tensor, dependent: Tensor) -> str | None:
    """Returns how many float32 numbers have other bits, in words; None where none has."""
    count = int((plain.contiguous().view(torch.int32) != dependent.contiguous().view(torch.int32)).sum())
    return f"{count} of {plain.numel()} logits" if count else None
