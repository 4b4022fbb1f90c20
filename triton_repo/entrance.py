"""Where a server listens, and what it asks of clients there; checked before anything is started.

On loopback nobody has to show a key. On any other address a server without keys or without TLS does not start: whoever reaches the port
could use the model, and keys would travel in the clear.

gRPC goes through the front, or to Triton itself. Triton knows no bearer keys, so the latter is for loopback alone.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

from foundation.core.errors import InputError, Problem
from foundation.core.shown import shown
from triton_repo.front.doors import Doors
from triton_repo.front.settings import KEYS
from triton_repo.ports import Grpc
from triton_repo.server import ADDRESS

LEAST_KEY = 16
"""Fewest characters of a key."""
_KEY = re.compile(r"[!-~]+")


@dataclass(frozen=True)
class Entrance:
    """The address of a server, and its certificate."""

    address: str = ADDRESS
    """IPv4 address to listen on; 0.0.0.0 for all."""
    certificate: str = ""
    """File of the certificate with its chain, PEM; empty: no TLS."""
    private_key: str = ""
    """File of its private key, PEM."""
    grpc: Grpc = "front"
    """Who answers gRPC: the front, or Triton itself."""

    @property
    def is_direct(self) -> bool:
        """Whether gRPC goes to Triton itself."""
        return self.grpc == "triton"

    def check(self) -> None:
        """Checks address, keys and certificate.

        Raises:
            InputError: One of them is missing or wrong; one line for each.
        """
        problems = list(self._problems())
        if problems:
            raise InputError.of(problems)

    def _problems(self) -> Iterator[Problem]:
        doors = Doors.here(self.certificate, self.private_key)
        try:
            is_open = not ipaddress.IPv4Address(self.address).is_loopback
        except ValueError:
            yield Problem(f"--address {shown(self.address, 60)}", "no IPv4 address", remedy="give one such as 127.0.0.1 or 0.0.0.0")
            return
        if self.is_direct and (is_open or doors.keys or self.certificate):
            asked = f"--address {self.address}" if is_open else KEYS if doors.keys else "--tls"
            given = f"given with {asked}, and Triton's gRPC checks no keys"
            remedy = "leave out --grpc: the front checks them"
            yield Problem("--grpc triton", given, "only loopback without keys and TLS is allowed", remedy)
            return
        if is_open and not doors.keys:
            given = f"{self.address} is reached from other machines, and no key is asked for"
            yield Problem("--address", given, remedy=f"set the variable {KEYS} to one or several keys, separated by spaces")
        if is_open and not self.certificate:
            given = f"{self.address} is reached from other machines, and keys would travel in the clear"
            yield Problem("--address", given, remedy="give a certificate and its key with --tls CERTIFICATE KEY")
        for number, key in enumerate(doors.keys, 1):
            if len(key) < LEAST_KEY or not _KEY.fullmatch(key):
                allowed = f"at least {LEAST_KEY} printable ASCII characters are allowed"
                yield Problem(KEYS, f"key {number} has {len(key)} characters", allowed, "make one with: openssl rand -hex 32")
        try:
            doors.context()
        except (OSError, ssl.SSLError) as error:
            remedy = "give the certificate with its chain and its unencrypted private key, both as PEM"
            yield Problem(f"--tls {self.certificate} {self.private_key}", f"cannot be used ({error.strerror or error})", remedy=remedy)
