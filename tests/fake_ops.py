"""Implementations of ops for tests of what surrounds them, and the worker's side that knows them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shipway.errors import ShipwayError
from shipway.measure.op_target import OpTarget
from shipway.ops.catalogue import OPS
from shipway.ops.op import Case, Implementation, KnownFailure

COMPILE_ERROR = "the Mojo kernels do not compile: mojo/kernels/linear.mojo:3:5: error: no such name"


def _torch(dtype: str, head_dim: int) -> Callable[..., Any]:
    return OPS["linear"].implementations["torch"].make(dtype, head_dim)


def _wrong(dtype: str, head_dim: int) -> Callable[..., Any]:
    right = _torch(dtype, head_dim)
    return lambda x, w: right(x, w) + 1


def _dies(dtype: str, head_dim: int) -> Callable[..., Any]:
    return lambda x, w: os.abort()


def _raises(dtype: str, head_dim: int) -> Callable[..., Any]:
    raise RuntimeError("a bug\nof two lines")


def _uncompiled(dtype: str, head_dim: int) -> Callable[..., Any]:
    raise ShipwayError(COMPILE_ERROR)


_CASE = Case({"T": 1, "N": 1, "K": 1})
_ROW = Implementation("row", _torch, ("f32", "bf16"), strided="handled", bitwise=False, requires=("torch",))
_KNOWN = KnownFailure("columns_alone", "columns are added up", _CASE, ("f32", "bf16"))
ROWS = {
    row.name: row
    for row in (
        replace(_ROW, name="right"),
        replace(_ROW, name="wrong", make=_wrong),
        replace(_ROW, name="dies", make=_dies),
        replace(_ROW, name="raises", make=_raises),
        replace(_ROW, name="uncompiled", make=_uncompiled),
        replace(_ROW, name="absent", requires=("no_such_module",), install="no-such-package==1"),
        replace(_ROW, name="single", dtypes=("f32",)),
        replace(_ROW, name="stale", known=(replace(_KNOWN, property="identity_returns_x"),)),
    )
}


def add(patch: pytest.MonkeyPatch) -> None:
    """Gives ``linear`` these rows beside PyTorch's and no others."""
    rows = {"torch": OPS["linear"].implementations["torch"], **ROWS}
    patch.setitem(OPS, "linear", replace(OPS["linear"], implementations=rows))


class Target(OpTarget):
    """A worker's target in whose catalogue ``linear`` has these rows."""

    def __init__(self) -> None:
        super().__init__()
        add(pytest.MonkeyPatch())
