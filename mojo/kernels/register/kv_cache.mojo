"""Cache accessors of tensors, and the checks of what a batch asks of a cache.
"""
from extensibility import InputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.kv_cache import CacheShape, ContiguousCache, PagedCache, RUN


def contiguous(
    cache: MutableInputTensor[rank=6, ...],
) -> ContiguousCache:
    """The accessor of a cache `[B, layers, 2, S, kv_heads, head_dim]`."""
    return ContiguousCache(
        CacheShape(
            cache.dim_size(0),
            cache.dim_size(1),
            cache.dim_size(3),
            cache.dim_size(4),
            cache.dim_size(5),
        )
    )


def paged(
    blocks: MutableInputTensor[rank=6, ...],
    lookup: InputTensor[dtype=DType.uint32, rank=2, ...],
    page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
) raises -> PagedCache[ImmUnsafeAnyOrigin]:
    """The accessor of pages `[pages, 2, layers, page_size, kv_heads, head_dim]`.

    Args:
        blocks: The pages.
        lookup: `[B, pages per sequence]`: the page of each `page_size`
            positions.
        page_stride: `[1]` elements from a page to the next, negative when
            pages are packed.
    """
    var page_size = blocks.dim_size(3)
    if page_size % RUN != 0:
        raise Error("pages of ", page_size, " tokens: not a multiple of ", RUN)
    var stride = Int(page_stride.unsafe_ptr()[unsafe_offset=0])
    if stride < 0:
        stride = (
            2
            * blocks.dim_size(2)
            * page_size
            * blocks.dim_size(4)
            * blocks.dim_size(5)
        )
    return PagedCache(
        CacheShape(
            lookup.dim_size(0),
            blocks.dim_size(2),
            lookup.dim_size(1) * page_size,
            blocks.dim_size(4),
            blocks.dim_size(5),
        ),
        page_size,
        stride,
        lookup.unsafe_ptr(),
    )


def check_sequences(
    op: StaticString,
    offsets: Pointer[Int32, _],
    start: Pointer[Int32, _],
    b: Int,
    tokens: Int,
    capacity: Int,
    positions: Int,
    first: Int,
) raises:
    """Raises unless the ragged rows cover `tokens`, start at position `first`
    or later and end inside the cache."""
    if (
        Int(offsets[unsafe_offset=0]) != 0
        or Int(offsets[unsafe_offset=b]) != tokens
    ):
        raise Error(op, ": offsets do not cover ", tokens, " tokens")
    for i in range(b):
        var new = Int(offsets[unsafe_offset=i + 1] - offsets[unsafe_offset=i])
        var end = Int(start[unsafe_offset=i]) + new
        if (
            new < 0
            or Int(start[unsafe_offset=i]) < first
            or end > capacity
            or end > positions
        ):
            raise Error(
                op,
                ": sequence ",
                i,
                " goes from position ",
                start[unsafe_offset=i],
                " to ",
                end,
                ", the cache holds ",
                min(capacity, positions),
            )
