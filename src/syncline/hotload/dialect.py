"""Where servers of the hot-load API differ: the names of two headers and of one checksum."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one kind of server wants to be spoken to.

    Attributes:
        name: for messages.
        model_header, deployment_header: what carries the model's and the deployment's identifier.
        adler32: what the server calls the checksum format `adler32`.

    Example:
        >>> FIREWORKS.checksum("adler32"), ROLLOUT.checksum("adler32")
        ('alder32', 'adler32')
    """

    name: str
    model_header: str
    deployment_header: str
    adler32: str = "adler32"

    def checksum(self, name: str) -> str:
        """Return what the server calls this checksum format."""
        return self.adler32 if name == "adler32" else name


ROLLOUT = Dialect("rollout", "Provider-Model", "Provider-Deployment")
"""The RL Rollout Spec as written; Syncline's own server takes it."""

FIREWORKS = Dialect("fireworks", "fireworks-model", "fireworks-deployment", adler32="alder32")
"""Fireworks: headers of its own, and `alder32` for Adler-32 in its documents and its SDK."""
