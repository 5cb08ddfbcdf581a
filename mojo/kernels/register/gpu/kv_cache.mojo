"""A KV cache of either layout, as the kernels' arguments give it."""
from extensibility import InputTensor
from extensibility.managed_tensor_slice import (
    _MutableInputTensor as MutableInputTensor,
)
from kernels.kv_cache import CacheShape
from kernels.register import kv_cache
from kernels.register.gpu.launch import unread


@fieldwise_init
struct DeviceCache[paged: Bool](ImplicitlyCopyable, Movable):
    """What a kernel is told of a cache besides where it lies.

    Parameters:
        paged: Whether it is MAX's pages (`PagedCache`), else `ContiguousCache`.
    """

    var shape: CacheShape
    var lookup: ImmPointer[UInt32, UntrackedOrigin[mut=False]]
    """On the device, `[B, pages per sequence]`; read when `paged`."""
    var page_size: Int32
    var page_stride: Int64


def contiguous(cache: MutableInputTensor[rank=6, ...]) -> DeviceCache[False]:
    """A cache `[B, layers, 2, S, kv_heads, head_dim]`."""
    return {
        kv_cache.contiguous(cache).extent(),
        unread[DType.uint32](cache.unsafe_ptr()),
        0,
        0,
    }


def paged(
    blocks: MutableInputTensor[rank=6, ...],
    lookup: InputTensor[dtype=DType.uint32, rank=2, ...],
    page_stride: InputTensor[dtype=DType.int64, rank=1, ...],
) raises -> DeviceCache[True]:
    """Pages `[pages, 2, layers, page_size, kv_heads, head_dim]`.

    Args:
        blocks: The pages.
        lookup: `[B, pages per sequence]`, on the device.
        page_stride: `[1]` elements from a page to the next, negative when
            pages are packed; on the host, where MAX's server leaves it.
    """
    var pages = kv_cache.paged(blocks, lookup, page_stride)
    return {
        pages.extent(),
        pages.lookup.unsafe_origin_cast[UntrackedOrigin[mut=False]](),
        Int32(pages.page_size),
        Int64(pages.page_stride),
    }
