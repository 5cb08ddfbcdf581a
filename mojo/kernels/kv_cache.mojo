"""Where a sequence's keys and values lie."""


@fieldwise_init
struct ContiguousCache(ImplicitlyCopyable, Movable):
    """A cache `[B, layers, 2, S, kv_heads, head_dim]` (0 = K, 1 = V).

    Attention reads runs of keys that start at multiples of `RUN`; a layout must
    keep each such run at one constant row stride.
    """

    comptime RUN = 128
    """Keys of an aligned run."""

    var layers: Int
    var capacity: Int
    var kv_heads: Int
    var head_dim: Int

    @always_inline
    def row_stride(self) -> Int:
        """Elements from a position to the next, within a run."""
        return self.kv_heads * self.head_dim

    @always_inline
    def offset(
        self, b: Int, layer: Int, value: Int, position: Int, head: Int
    ) -> Int:
        """Element offset of one head's key (value = 0) or value (1) row."""
        var plane = (b * self.layers + layer) * 2 + value
        return (
            (plane * self.capacity + position) * self.kv_heads + head
        ) * self.head_dim
