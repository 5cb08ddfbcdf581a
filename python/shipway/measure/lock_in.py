"""What binds a user to each route's compiler, from the dated table ``bench/lock_in.toml``."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def lock_in_table() -> dict[str, Any]:
    """Returns the parsed table: one row a route, and ``dated``."""
    return tomllib.loads(files("shipway").joinpath("data/lock_in.toml").read_text())


def lock_in(route: str) -> str:
    """Returns licence and openness of the route's compiler in a few words; a route without a row is ``"unknown"``."""
    label: str = lock_in_table().get(route, {}).get("label", "unknown")
    return label
