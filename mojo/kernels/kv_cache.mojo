"""Where a sequence's keys and values lie: one accessor per cache layout.

Kernels are generic over the accessor, so that a layout is chosen at compile
time and costs nothing inside a kernel.
"""

comptime RUN = 128
"""Keys of an aligned run: attention reads keys from a multiple of `RUN` up to
the next one at a constant row stride, whatever the layout."""


@fieldwise_init
struct CacheShape(ImplicitlyCopyable, Movable):
    """What a cache holds, in whatever layout."""

    var sequences: Int
    var layers: Int
    var capacity: Int
    """Positions of a sequence."""
    var kv_heads: Int
    var head_dim: Int


trait KVCache(ImplicitlyCopyable, Movable):
    """A layout of keys and values."""

    def extent(self) -> CacheShape:
        """What the cache holds."""
        ...

    def row_stride(self) -> Int:
        """Elements from a position to the next, within a run."""
        ...

    def offset(
        self, b: Int, layer: Int, value: Int, position: Int, head: Int
    ) -> Int:
        """Element offset of one head's key (value = 0) or value (1) row."""
        ...


@fieldwise_init
struct ContiguousCache(KVCache):
    """A cache `[B, layers, 2, S, kv_heads, head_dim]` (0 = K, 1 = V)."""

    var shape: CacheShape

    @always_inline
    def extent(self) -> CacheShape:
        return self.shape

    @always_inline
    def row_stride(self) -> Int:
        return self.shape.kv_heads * self.shape.head_dim

    @always_inline
    def offset(
        self, b: Int, layer: Int, value: Int, position: Int, head: Int
    ) -> Int:
        var plane = (b * self.shape.layers + layer) * 2 + value
        return (
            (plane * self.shape.capacity + position) * self.shape.kv_heads
            + head
        ) * self.shape.head_dim


@fieldwise_init
struct PagedCache[origin: ImmOrigin](KVCache):
    """MAX's pages `[pages, 2, layers, page_size, kv_heads, head_dim]`.

    Row `b` of `lookup` `[B, pages per sequence]` names the page of each
    `page_size` positions of sequence b. `page_size` is a multiple of `RUN`, so
    that no run straddles two pages.
    """

    var shape: CacheShape
    var page_size: Int
    var page_stride: Int
    """Elements from a page to the next."""
    var lookup: Pointer[UInt32, Self.origin]

    @always_inline
    def extent(self) -> CacheShape:
        return self.shape

    @always_inline
    def row_stride(self) -> Int:
        return self.shape.kv_heads * self.shape.head_dim

    @always_inline
    def offset(
        self, b: Int, layer: Int, value: Int, position: Int, head: Int
    ) -> Int:
        # 32 bits, and not 0: a GPU divides other numbers in dozens of
        # instructions and more registers.
        var size = max(UInt32(self.page_size), 1)
        var pages = Int(UInt32(self.shape.capacity) // size)
        var index = Int(UInt32(position) // size)
        var page = Int(self.lookup[unsafe_offset=b * pages + index])
        var plane = value * self.shape.layers + layer
        var row = plane * self.page_size + position - index * self.page_size
        return (
            page * self.page_stride
            + (row * self.shape.kv_heads + head) * self.shape.head_dim
        )
