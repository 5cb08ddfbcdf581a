"""How a weight matrix `[N, K]` is stored, read 16 bytes at a time.

- f32, bf16, f16: one number per element, rows one after another.
- int8: `[N, K]` signed bytes and a float16 scale for each `GROUP` elements of
  a row, `[N, ceil(K / GROUP)]`; an element is `q * scale`.
- int4: `[N, ceil(K / 2)]` bytes, element 2j of a row in the low half of its
  byte j and element 2j + 1 in the high half, from 0 to 15, with a float16
  scale and a zero point, one byte, for each `GROUP` elements of a row; an
  element is `(q - zero) * scale`.

A kernel takes the format as the dtype of what its pointer points to, uint8
for int4. The last group of a row may be short. These hold GGUF's Q8_0 and, with zero
points of 8, Q4_0 exactly.
"""
from std.memory import bitcast
from std.sys import size_of
from kernels.gpu.block import Global, untracked
from kernels.gpu.tile_op import F32

comptime GROUP = 32
"""Elements of a row that share a scale."""
comptime _FLOAT_BITS = UInt32(0x4B000000)
"""2^23 as a float32: with an integer below 2^23 in its low bits, the float32 of
2^23 plus that integer. Conversions of integers have a quarter of the rate of
float32 additions, or less, on NVIDIA."""
comptime _FLOAT_OFFSET = Float32(8388608)


@always_inline
def _parts[size: Int](n: Int) -> Int:
    """`ceildiv` of what is not negative, which takes fewer registers."""
    return (n + size - 1) // size


@fieldwise_init
struct Chunk(TrivialRegisterPassable):
    """16 bytes of a row and the numbers of its group."""

    var bits: SIMD[DType.uint32, 4]
    var scale: Float32
    var zero: Float32

    @always_inline
    def __init__(out self):
        self.bits = 0
        self.scale = 0
        self.zero = 0


trait WeightFormat(TrivialRegisterPassable):
    """Reads a weight matrix."""

    comptime CHUNK: Int
    """Elements of 16 bytes."""
    comptime SCALED: Bool
    """Whether an element is `decode` times the chunk's scale."""

    def in_chunks(self) -> Bool:
        """Whether every row can be read by aligned 16-byte loads."""
        ...

    def load(self, row: Int, at: Int) -> Chunk:
        """Loads elements at .. at + CHUNK - 1 of a row, at a multiple of
        CHUNK."""
        ...

    @staticmethod
    def decode[S: Int](chunk: Chunk) -> SIMD[F32, S]:
        """The first S elements of a chunk, without the scale."""
        ...

    def element(self, row: Int, at: Int) -> Float32:
        """One element, whatever its alignment, with the scale."""
        ...


@fieldwise_init
struct PlainWeight[w: DType](WeightFormat):
    """One number of dtype w per element."""

    comptime CHUNK = 16 // size_of[Self.w]()
    comptime SCALED = False
    var data: Global[Self.w]
    var k: Int

    @always_inline
    def in_chunks(self) -> Bool:
        return self.k % Self.CHUNK == 0 and Int(self.data) % 16 == 0

    @always_inline
    def load(self, row: Int, at: Int) -> Chunk:
        var values = self.data.unsafe_offset(row * self.k + at).unsafe_load[
            width=Self.CHUNK, alignment=16
        ]()
        return {bitcast[DType.uint32, 4](values), 1, 0}

    @staticmethod
    @always_inline
    def decode[S: Int](chunk: Chunk) -> SIMD[F32, S]:
        return (
            bitcast[Self.w, Self.CHUNK](chunk.bits)
            .slice[S, offset=0]()
            .cast[F32]()
        )

    @always_inline
    def element(self, row: Int, at: Int) -> Float32:
        return self.data[unsafe_offset=row * self.k + at].cast[F32]()


struct Int8Weight(WeightFormat):
    """Signed bytes with a scale per group."""

    comptime CHUNK = 16
    comptime SCALED = True
    var data: Global[DType.int8]
    var scales: Global[DType.float16]
    var k: Int

    @always_inline
    def __init__[
        w: DType, //
    ](
        out self,
        data: ImmPointer[Scalar[w], ImmutAnyOrigin],
        scales: ImmPointer[Float16, ImmutAnyOrigin],
        k: Int,
    ):
        """Takes an entry's arguments, of which w is int8."""
        self.data = rebind[Global[DType.int8]](untracked(data))
        self.scales = untracked(scales)
        self.k = k

    @always_inline
    def in_chunks(self) -> Bool:
        return self.k % Self.CHUNK == 0 and Int(self.data) % 16 == 0

    @always_inline
    def _scale(self, row: Int, at: Int) -> Float32:
        return self.scales[
            unsafe_offset=row * _parts[GROUP](self.k) + at // GROUP
        ].cast[F32]()

    @always_inline
    def load(self, row: Int, at: Int) -> Chunk:
        var values = self.data.unsafe_offset(row * self.k + at).unsafe_load[
            width=Self.CHUNK, alignment=16
        ]()
        return {bitcast[DType.uint32, 4](values), self._scale(row, at), 0}

    @staticmethod
    @always_inline
    def decode[S: Int](chunk: Chunk) -> SIMD[F32, S]:
        var values = SIMD[F32, S](0)
        comptime for i in range(S):
            # Flipping the sign bit adds 128.
            var word = chunk.bits[i // 4] ^ 0x80808080
            var q = (word >> UInt32(i % 4 * 8)) & 0xFF
            values[i] = bitcast[F32](q | _FLOAT_BITS) - (_FLOAT_OFFSET + 128)
        return values

    @always_inline
    def element(self, row: Int, at: Int) -> Float32:
        return self.data[unsafe_offset=row * self.k + at].cast[
            F32
        ]() * self._scale(row, at)


struct Int4Weight(WeightFormat):
    """Two elements per byte with a scale and a zero point per group."""

    comptime CHUNK = 32
    comptime SCALED = True
    var data: Global[DType.uint8]
    var scales: Global[DType.float16]
    var zeros: Global[DType.uint8]
    var k: Int

    @always_inline
    def __init__[
        w: DType, //
    ](
        out self,
        data: ImmPointer[Scalar[w], ImmutAnyOrigin],
        scales: ImmPointer[Float16, ImmutAnyOrigin],
        zeros: ImmPointer[UInt8, ImmutAnyOrigin],
        k: Int,
    ):
        """Takes an entry's arguments, of which w is uint8."""
        self.data = rebind[Global[DType.uint8]](untracked(data))
        self.scales = untracked(scales)
        self.zeros = untracked(zeros)
        self.k = k

    @always_inline
    def in_chunks(self) -> Bool:
        return self.k % Self.CHUNK == 0 and Int(self.data) % 16 == 0

    @always_inline
    def _group(self, row: Int, at: Int) -> Int:
        return row * _parts[GROUP](self.k) + at // GROUP

    @always_inline
    def load(self, row: Int, at: Int) -> Chunk:
        var group = self._group(row, at)
        var values = self.data.unsafe_offset(
            row * _parts[2](self.k) + at // 2
        ).unsafe_load[width=16, alignment=16]()
        return {
            bitcast[DType.uint32, 4](values),
            self.scales[unsafe_offset=group].cast[F32](),
            self.zeros[unsafe_offset=group].cast[F32](),
        }

    @staticmethod
    @always_inline
    def decode[S: Int](chunk: Chunk) -> SIMD[F32, S]:
        var values = SIMD[F32, S](0)
        comptime for i in range(S):
            var word = chunk.bits[i // 8]
            var q = (word >> UInt32(i % 8 * 4)) & 15
            values[i] = bitcast[F32](q | _FLOAT_BITS) - (
                _FLOAT_OFFSET + chunk.zero
            )
        return values

    @always_inline
    def element(self, row: Int, at: Int) -> Float32:
        var group = self._group(row, at)
        var byte = self.data[
            unsafe_offset=row * _parts[2](self.k) + at // 2
        ].cast[DType.uint32]()
        var q = (byte >> UInt32(at % 2 * 4)) & 15
        return (
            q.cast[F32]() - self.zeros[unsafe_offset=group].cast[F32]()
        ) * self.scales[unsafe_offset=group].cast[F32]()
