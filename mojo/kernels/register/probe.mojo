"""Op `probe_read`: the read bandwidth of this machine, to compare with."""
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from max.runtime.asyncrt import parallelism_level
import extensibility
from extensibility import InputTensor, OutputTensor
from kernels.dot_tile import F32, W
from kernels.workers import first_tile


@extensibility.register("probe_read")
struct ProbeRead:
    """Reads x[n] once, in address order, on all workers; out[1] is its sum."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        output: OutputTensor[dtype=F32, rank=1, ...],
        x: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime ACCUMULATORS = 8
        comptime STEP = ACCUMULATORS * W
        var n = x.dim_size(0) // STEP
        var xp = x.unsafe_ptr()
        var workers = parallelism_level(None)
        var sums = List[Float32](length=workers * W, fill=0)
        var sp = sums.unsafe_ptr()

        def share(worker: Int) {imm}:
            var acc = Array[SIMD[F32, W], ACCUMULATORS](fill=0)
            for i in range(
                first_tile(worker, workers, n),
                first_tile(worker + 1, workers, n),
            ):
                comptime for a in range(ACCUMULATORS):
                    acc[a] += xp.unsafe_load[width=W](i * STEP + a * W)
            comptime for a in range(1, ACCUMULATORS):
                acc[0] += acc[a]
            sp[unsafe_offset=worker * W] = acc[0].reduce_add()

        sync_parallelize(share, workers)
        var total = Float32(0)
        for worker in range(workers):
            total += sp[unsafe_offset=worker * W]
        output.unsafe_ptr()[unsafe_offset=0] = total
