"""Shipway: one model through several routes, each judged against float64 and timed on the machine at hand."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shipway.api import Model, load
    from shipway.errors import CannotRunError, ShipwayError
    from shipway.streaming import Token

__all__ = ["CannotRunError", "Model", "ShipwayError", "Token", "load"]

_HOME = {
    "CannotRunError": "shipway.errors",
    "Model": "shipway.api",
    "ShipwayError": "shipway.errors",
    "Token": "shipway.streaming",
    "load": "shipway.api",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use: a worker imports this package before its CPU affinity is set."""
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'shipway' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
