"""Op `embedding`."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.dot_tile import F32
from kernels.embedding import embedding_row


@extensibility.register("embedding")
struct Embedding:
    """Copies out[T, K] = table[ids[T], K], float32."""

    @staticmethod
    def execute[
        wt: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=F32, rank=2, ...],
        ids: InputTensor[dtype=DType.int32, rank=1, ...],
        table: InputTensor[dtype=wt, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var n = table.dim_size(1)
        var idp = ids.unsafe_ptr()
        for i in range(ids.dim_size(0)):
            var id = Int(idp[unsafe_offset=i])
            if id < 0 or id >= table.dim_size(0):
                raise Error(
                    "embedding: id ",
                    id,
                    " of a vocabulary of ",
                    table.dim_size(0),
                )
            embedding_row(
                output.unsafe_ptr().unsafe_offset(i * n),
                table.unsafe_ptr(),
                id,
                n,
            )
