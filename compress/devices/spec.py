"""The devices that a plan is made for, as the command line gives them.

8x80GB                          eight devices of 80 GB, linked by PCIe
8x80GB,nvlink                   linked so fast that two may share each layer
8x80GB,nvlink,3.35TB/s          and how fast each reads its memory, from which a time is predicted
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from foundation.core.errors import InputError

Link = Literal["pcie", "nvlink"]
UNITS = {"GB": 10**9, "GiB": 2**30, "MB": 10**6}
USABLE = 0.9
"""Share of a device's memory that a model may take; the rest is for the context of the driver and for what fragments. vLLM's default."""
ALLOWED = "8x80GB, or 8x80GB,nvlink, or 8x80GB,nvlink,3.35TB/s, is allowed"
_COUNT = re.compile(r"(\d{1,4})x(\d{1,6}(?:\.\d+)?)(GB|GiB|MB)")
_SPEED = re.compile(r"(\d{1,6}(?:\.\d+)?)(GB|TB)/s")


@dataclass(frozen=True)
class Devices:
    """Devices of one kind in one machine."""

    count: int
    memory: int
    """Bytes of each."""
    link: Link = "pcie"
    bandwidth: float | None = None
    """Bytes that each reads from its memory in a second; None: unknown."""

    @property
    def usable(self) -> int:
        """Bytes of each that a model may take."""
        return int(USABLE * self.memory)


def shown_bytes(size: float) -> str:
    """Returns a number of bytes for a message: `12.3 kB`, `12.3 MB`, `1.23 GB`."""
    return f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"


def devices(text: str) -> Devices:
    """Returns the devices that a text describes.

    Raises:
        InputError: It is none of the forms above.
    """
    first, *rest = (part.strip() for part in text.split(","))
    found = _COUNT.fullmatch(first)
    if found is None or not int(found[1]) or not float(found[2]):
        raise InputError("--devices", f"{text!r} given", ALLOWED)
    link: Link = "pcie"
    bandwidth = None
    for part in rest:
        speed = _SPEED.fullmatch(part)
        if part in ("pcie", "nvlink"):
            link = "nvlink" if part == "nvlink" else "pcie"
        elif speed is not None and float(speed[1]):
            bandwidth = float(speed[1]) * (1e12 if speed[2] == "TB" else 1e9)
        else:
            raise InputError("--devices", f"{part!r} given in {text!r}", ALLOWED)
    return Devices(int(found[1]), round(float(found[2]) * UNITS[found[3]]), link, bandwidth)
