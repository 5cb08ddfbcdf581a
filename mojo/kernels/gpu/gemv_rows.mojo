"""A few rows of weights times a few rows of x, by one warp.

The weights stream past once: every lane has several 16-byte loads under way
before it uses the first, and x comes from the cache.
"""
from std.sys import size_of
from std.utils import StaticTuple
from max.gpu import WARP_SIZE, lane_id
from max.gpu.primitives import warp
from kernels.gpu.block import Global
from kernels.gpu.reduce import halvings
from kernels.gpu.tile_op import F32
from kernels.gpu.weight_format import Chunk, WeightFormat

comptime STREAMS = 2
"""Rows of weights that a warp reads together, over all matrices: what is read
of x is used for each, but each has a sum for every row of x."""


@always_inline
def loads_ahead(batch: Int) -> Int:
    """16-byte loads that a lane has under way.

    4 KiB a warp: with four blocks of four warps on a multiprocessor 64 KiB,
    twice what covers the latency of HBM3. Half of it where the sums of many
    rows of x take the registers.
    """
    return 256 // WARP_SIZE // (2 if batch >= 4 else 1)


@fieldwise_init
struct GemvRows[W: WeightFormat, t: DType, COUNT: Int, BATCH: Int](
    TrivialRegisterPassable
):
    """Rows of x and weight matrices `[N, K]` in the same format.

    Parameters:
        W: The format.
        t: Dtype of x.
        COUNT: Weight matrices, 1 or 2.
        BATCH: Rows of x.
    """

    comptime ROWS = STREAMS // Self.COUNT
    """Rows of each matrix that a warp takes."""
    comptime MANY = Self.BATCH >= 2
    """Whether the rows of x take many registers."""
    comptime Sums = Array[Float32, STREAMS * Self.BATCH]
    """Products, (weights, row of them, row of x)."""

    var weights: StaticTuple[Self.W, Self.COUNT]
    var x: Global[Self.t]
    var x_at: StaticTuple[Int, Self.BATCH]
    """Where each row of x begins."""
    var n: Int
    var k: Int

    comptime OUTPUTS = Self.ROWS * Self.BATCH
    """Products with each of the matrices: lane b + BATCH * r of the warp gets
    row r of the weights times row b of x."""

    @always_inline
    def products[in_chunks: Bool](self, row: Int) -> Array[Float32, Self.COUNT]:
        """The lane's product with each of the matrices, of the rows of weights
        from `row` on. Rows from N on are the last one again.

        All lanes of a warp call it with the same row.

        Parameters:
            in_chunks: Whether rows of x and weights can be read by 16-byte
                loads.
        """
        var sums = Self.Sums(fill=0)
        comptime if in_chunks:
            self._add_chunks(sums, row)
        else:
            self._add_elements(sums, row)
        var products = Array[Float32, Self.COUNT](fill=0)
        comptime for w in range(Self.COUNT):
            products[w] = Self._fold[w](sums)
        return products^

    @staticmethod
    @always_inline
    def _fold[w: Int](sums: Self.Sums) -> Float32:
        """Adds the lanes' shares of the products with weights w.

        While there are several products, a lane gives half of them away and
        keeps the other half, so that each is added in as many steps as there
        are halvings of the warp, and all of them take hardly more shuffles
        than one.
        """
        var lane = Int(lane_id())
        var shares = Array[Float32, Self.OUTPUTS](fill=0)
        comptime for i in range(Self.OUTPUTS):
            shares[i] = sums[w * Self.OUTPUTS + i]
        comptime for step in range(halvings(Self.OUTPUTS)):
            comptime HALF = Self.OUTPUTS >> (step + 1)
            var upper = lane & HALF != 0
            comptime for i in range(HALF):
                var kept = shares[i + HALF] if upper else shares[i]
                var given = shares[i] if upper else shares[i + HALF]
                shares[i] = kept + warp.shuffle_xor(given, UInt32(HALF))
        comptime for step in range(halvings(WARP_SIZE // Self.OUTPUTS)):
            shares[0] += warp.shuffle_xor(
                shares[0], UInt32(Self.OUTPUTS << step)
            )
        return shares[0]

    @always_inline
    def _row[s: Int](self, row: Int) -> Int:
        """Row of its matrix that stream s is, the last one if beyond."""
        return min(row + s % Self.ROWS, self.n - 1)

    @always_inline
    def _add_chunks(self, mut sums: Self.Sums, row: Int):
        comptime CHUNK = Self.W.CHUNK
        comptime STEP = WARP_SIZE * CHUNK
        comptime AHEAD = max(1, loads_ahead(Self.BATCH) // STREAMS)
        for first in range(Int(lane_id()) * CHUNK, self.k, STEP * AHEAD):
            var held = Array[Chunk, AHEAD * STREAMS](fill=Chunk())
            comptime for u in range(AHEAD):
                if first + u * STEP < self.k:
                    comptime for s in range(STREAMS):
                        held[u * STREAMS + s] = self.weights[
                            s // Self.ROWS
                        ].load(self._row[s](row), first + u * STEP)
            comptime for u in range(AHEAD):
                if first + u * STEP < self.k:
                    var chunks = Array[Chunk, STREAMS](fill=Chunk())
                    comptime for s in range(STREAMS):
                        chunks[s] = held[u * STREAMS + s]
                    self._add_chunk(sums, chunks, first + u * STEP)

    @always_inline
    def _add_chunk(
        self, mut sums: Self.Sums, chunks: Array[Chunk, STREAMS], at: Int
    ):
        """Adds the products with one chunk of each row, from element `at`."""
        # A sum per chunk saves multiplications, but costs registers.
        comptime if Self.W.SCALED and not Self.MANY:
            var part = Self.Sums(fill=0)
            self._add_products(part, chunks, at)
            comptime for i in range(STREAMS * Self.BATCH):
                sums[i] = part[i].fma(chunks[i // Self.BATCH].scale, sums[i])
        else:
            self._add_products(sums, chunks, at)

    @always_inline
    def _add_products(
        self, mut sums: Self.Sums, chunks: Array[Chunk, STREAMS], at: Int
    ):
        """Adds the products with the decoded elements of the chunks."""
        # With several rows of x a part at a time, for the registers' sake.
        comptime S = min(8, Self.W.CHUNK) if Self.MANY else Self.W.CHUNK
        var left = chunks.copy()
        # Not unrolled: a compiler that sees all loads of x begins them all.
        for first in range(0, Self.W.CHUNK, S):
            var w = Array[SIMD[F32, S], STREAMS](fill=SIMD[F32, S](0))
            comptime for s in range(STREAMS):
                w[s] = Self.W.decode[S](left[s])
                comptime if Self.W.SCALED and Self.MANY:
                    w[s] *= left[s].scale
                left[s].bits = left[s].bits.rotate_left[
                    4 * S // Self.W.CHUNK % 4
                ]()
            comptime for b in range(Self.BATCH):
                var x = (
                    self.x.unsafe_offset(self.x_at[b] + at + first)
                    .unsafe_load[
                        width=S, alignment=min(16, S * size_of[Self.t]())
                    ]()
                    .cast[F32]()
                )
                comptime for s in range(STREAMS):
                    comptime for j in range(S):
                        sums[s * Self.BATCH + b] = w[s][j].fma(
                            x[j], sums[s * Self.BATCH + b]
                        )

    @always_inline
    def _add_elements(self, mut sums: Self.Sums, row: Int):
        """The same one element at a time, neighbouring lanes side by side."""
        for at in range(Int(lane_id()), self.k, WARP_SIZE):
            var x = Array[Float32, Self.BATCH](fill=0)
            comptime for b in range(Self.BATCH):
                x[b] = self.x[unsafe_offset=self.x_at[b] + at].cast[F32]()
            comptime for s in range(STREAMS):
                var w = self.weights[s // Self.ROWS].element(
                    self._row[s](row), at
                )
                comptime for b in range(Self.BATCH):
                    sums[s * Self.BATCH + b] = w.fma(
                        x[b], sums[s * Self.BATCH + b]
                    )
