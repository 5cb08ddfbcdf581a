"""The table of intrinsics, ``intrinsics.toml``, by name."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SCOPES = ("lane", "warp", "mask", "group", "block")
"""Whom an operation waits for, in the order of the runtime's numbers."""


@dataclass(frozen=True)
class Intrinsic:
    """What an intrinsic means.

    Attributes:
        name: The intrinsic without ``@``, or ``asm`` and the template of the inline assembly.
        scope: One of :data:`SCOPES`.
        orders: Whether the lanes that execute it see each other's earlier accesses afterwards.
        run: Function of the runtime that does it.
        document: The vendor's document that says so.
    """

    name: str
    scope: str
    orders: bool
    run: str
    document: str


@cache
def table() -> dict[str, Intrinsic]:
    """Returns every intrinsic that is simulated, by its name."""
    families = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["family"]
    return {
        name: Intrinsic(name, family["scope"], family.get("orders", False), run, family["document"])
        for family in families
        for name, run in family["run"].items()
    }
