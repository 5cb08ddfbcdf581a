"""Op `rope`."""
from max.gpu.host import DeviceContext
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.dot_tile import F32
from kernels.rope import rope_share
from kernels.workers import fork, worker_count


@extensibility.register("rope")
struct Rope:
    """Rotates x[T, heads, head_dim] by the rows positions[T] of a table."""

    @staticmethod
    def execute[
        t: DType, //, target: StaticString
    ](
        output: OutputTensor[dtype=t, rank=3, ...],
        x: InputTensor[dtype=t, rank=3, ...],
        table: InputTensor[dtype=F32, rank=2, ...],
        positions: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var tokens = x.dim_size(0)
        var heads = x.dim_size(1)
        var head_dim = x.dim_size(2)
        var rotary_dim = table.dim_size(1)
        if positions.dim_size(0) != tokens or rotary_dim > head_dim:
            raise Error(
                "rope: ",
                positions.dim_size(0),
                " positions for ",
                tokens,
                " tokens, rotary_dim ",
                rotary_dim,
                " for heads of ",
                head_dim,
            )
        var at = positions.unsafe_ptr()
        for token in range(tokens):
            var position = at[unsafe_offset=token]
            if position < 0 or Int(position) >= table.dim_size(0):
                raise Error(
                    "rope: position ",
                    position,
                    " of token ",
                    token,
                    ", the table has ",
                    table.dim_size(0),
                )
        var out = output.unsafe_ptr()
        var xp = x.unsafe_ptr()
        var tp = table.unsafe_ptr()
        var workers = max(1, worker_count(tokens, tokens * heads * head_dim))
        var scratch = List[Float32](length=workers * head_dim, fill=0)
        var sp = scratch.unsafe_ptr()

        def share(worker: Int) {imm}:
            rope_share(
                out,
                xp,
                tp,
                at,
                sp,
                tokens,
                heads,
                head_dim,
                rotary_dim,
                worker,
                workers,
            )

        fork(share, workers)
