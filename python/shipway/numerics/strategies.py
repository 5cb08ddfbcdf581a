"""Hypothesis strategies for cases: shapes, seed, scale and distribution are drawn, array contents are not."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from shipway.ops.data import LAYOUTS
from shipway.ops.op import Case, Dim, Op


def cases(
    op: Op, static: Mapping[str, tuple[int, ...]] | None = None, *, laid_out: bool = False
) -> st.SearchStrategy[Case]:
    """Cases of an op.

    Args:
        op: The op.
        static: Values to draw static dims from, where fewer than the op's own are compiled.
        laid_out: Whether arguments get a layout that is not contiguous.
    """
    return st.builds(
        Case,
        dims=st.fixed_dictionaries({name: _dim(dim, (static or {}).get(name)) for name, dim in op.dims.items()}),
        seed=st.integers(0, 2**16),
        scale=st.sampled_from(op.scales),
        distribution=st.sampled_from(op.distributions),
        layout=st.sampled_from(LAYOUTS[1:] if laid_out else LAYOUTS[:1]),
    )


def _dim(dim: Dim, static: tuple[int, ...] | None) -> st.SearchStrategy[int]:
    if dim.static:
        return st.sampled_from(static or dim.special)
    anything = st.integers(dim.low, dim.high)
    # Shrinking goes to the first: to the low end, not to the first special value.
    return st.one_of(anything, st.sampled_from(dim.special)) if dim.special else anything
