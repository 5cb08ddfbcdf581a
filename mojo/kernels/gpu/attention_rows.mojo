"""What attention holds of a lane's query rows: which keys they see, and their
softmax so far."""
from std.math import exp2
from std.utils.numerics import neg_inf
from kernels.gpu.product_rows import rows_max
from kernels.gpu.tile_op import (
    F32,
    TILE,
    Accumulator,
    accumulator_size,
    c_col,
    c_row,
)


@fieldwise_init
struct Mask(TrivialRegisterPassable):
    """What a lane's rows see of a step's keys.

    In 32 bits and relative to the lane's first element: registers are short.
    """

    var position: Int32
    """Of the first element's row, counted from the step's first key."""
    var column: Int32
    """Of the first element, which is its key in a product of scores."""
    var reach: UInt32
    """Keys that a row sees, its own included, 2^31 for all."""

    @always_inline
    def sees_key[i: Int](self, key: Int) -> Bool:
        """Whether the row of element i sees a key of the step."""
        var distance = self.position + Int32(c_row[i](0) - key)
        return UInt32(distance) < self.reach  # negative ones are large

    @always_inline
    def sees_own[i: Int](self, tile: Int) -> Bool:
        """Whether the row of element i sees the key of its column in one of the
        step's tiles of 16 keys."""
        comptime KEY = c_col[i](0)
        return Self(self.position - self.column, 0, self.reach).sees_key[i](
            tile * TILE + KEY
        )

    @always_inline
    def hide[N: Int, //](self, mut scores: Array[Accumulator, N]):
        """Makes minus infinity of the scores of keys that rows do not see."""
        comptime for j in range(N):
            comptime for i in range(accumulator_size()):
                if not self.sees_own[i](j):
                    scores[j][i] = neg_inf[F32]()


@fieldwise_init
struct RowSoftmax(TrivialRegisterPassable):
    """Softmax of a lane's rows over the keys so far."""

    var top: Accumulator
    """Maximum of each element's row."""
    var total: Accumulator
    """Sum of the weights of each element's columns."""

    @staticmethod
    @always_inline
    def none() -> Self:
        return {Accumulator(neg_inf[F32]()), Accumulator(0)}

    @always_inline
    def weigh[
        N: Int, //, t: DType
    ](mut self, mut scores: Array[Accumulator, N]) -> Accumulator:
        """Turns scores, in units of log2, into weights that t holds, so that
        what is summed is what values are weighted by.

        Returns:
            The factor of what was summed before.
        """
        var top = self.top
        comptime for j in range(N):
            top = max(top, scores[j])
        top = rows_max(top)
        # While every score is minus infinity, score - top would be NaN.
        var none = top.eq(Accumulator(neg_inf[F32]()))
        var shift = none.select(Accumulator(0), top)
        var before = exp2(self.top - shift)
        self.top = top
        self.total *= before
        comptime for j in range(N):
            scores[j] = exp2(scores[j] - shift).cast[t]().cast[F32]()
            self.total += scores[j]
        return before
