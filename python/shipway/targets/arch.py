"""What each target has, from the documents its vendor publishes, and how many blocks of a kernel fit.

A multiprocessor (NVIDIA's SM, CDNA's CU, RDNA's WGP of two CUs) has four partitions (sub-partitions, SIMDs) with a
register file each; warps (wavefronts) of a block are spread over them, and all share one shared memory (LDS).
"""

from __future__ import annotations

from dataclasses import dataclass

_GUIDE = "CUDA Programming Guide 13, 5.1 Compute Capabilities, and cuda_occupancy.h of the CUDA Toolkit 13.5"
_ROCM = "ROCm documentation, GPU hardware specifications; LLVM, User Guide for AMDGPU Backend and llvm-calc-occupancy"
_PARTITIONS = 4
WARPS = 4
"""Warps of a block of ours, ``WARPS`` of ``mojo/kernels/gpu/block.mojo``."""


@dataclass(frozen=True)
class Arch:
    """Limits of a target. Registers are 32 bits, counted per thread; memory is in bytes.

    Attributes:
        name: As LLVM and ptxas call it.
        vendor: ``"nvidia"`` or ``"amd"``.
        warp: Threads of a warp.
        max_warps: Warps a partition holds.
        max_blocks: Blocks a multiprocessor holds.
        registers: Registers of a partition, per thread of one warp: its 32-bit registers divided by ``warp``.
        register_step: What a kernel's registers are rounded up to.
        max_registers: Registers a thread may have.
        scalars: Scalar registers of a partition; 0 where they never limit how many warps it holds.
        scalar_step: What a warp's scalar registers are rounded up to.
        shared: Shared memory of a multiprocessor.
        shared_step: What a block's shared memory is rounded up to.
        shared_reserved: Shared memory that each block takes besides its own.
        max_shared: Shared memory a block may have, statically and dynamically allocated.
        static_shared: Shared memory a block may have without the launch asking for more.
        source: The documents.
    """

    name: str
    vendor: str
    warp: int
    max_warps: int
    max_blocks: int
    registers: int
    register_step: int
    max_registers: int
    scalars: int
    scalar_step: int
    shared: int
    shared_step: int
    shared_reserved: int
    max_shared: int
    static_shared: int
    source: str

    @property
    def threads(self) -> int:
        """Threads of a block of ours."""
        return WARPS * self.warp

    def blocks(self, registers: int, shared: int, scalars: int = 0) -> int:
        """Returns how many blocks of ours a multiprocessor holds at a time; 0 when not even one fits.

        Args:
            registers: Registers of a thread; on CDNA vector and accumulation registers together.
            shared: Shared memory of a block.
            scalars: Scalar registers of a warp.
        """
        needed = _rounded_up(shared + self.shared_reserved, self.shared_step)
        if registers > self.max_registers or shared > self.max_shared:
            return 0
        warps = self.max_warps
        for used, file, step in (
            (registers, self.registers, self.register_step),
            (scalars, self.scalars, self.scalar_step),
        ):
            if used and file:
                warps = min(warps, file // _rounded_up(used, step))
        by_shared = self.shared // needed if needed else self.max_blocks
        return min(warps * _PARTITIONS // WARPS, by_shared, self.max_blocks)

    def occupancy(self, blocks: int) -> float:
        """Returns which share of the warps a multiprocessor can hold that many blocks of ours are, from 0 to 1."""
        return blocks * WARPS / (_PARTITIONS * self.max_warps)


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _nvidia(name: str, max_warps: int, max_blocks: int, shared: int) -> Arch:
    return Arch(
        name=name,
        vendor="nvidia",
        warp=32,
        max_warps=max_warps // _PARTITIONS,
        max_blocks=max_blocks,
        registers=65536 // _PARTITIONS // 32,
        register_step=256 // 32,  # a warp's registers are allocated in units of 256
        max_registers=255,
        scalars=0,
        scalar_step=1,
        shared=shared << 10,
        shared_step=128,
        shared_reserved=1 << 10,
        max_shared=(shared - 1) << 10,
        static_shared=48 << 10,
        source=_GUIDE,
    )


def _cdna(name: str, shared: int, shared_step: int) -> Arch:
    return Arch(
        name=name,
        vendor="amd",
        warp=64,
        max_warps=8,
        max_blocks=16,
        registers=512,
        register_step=8,
        max_registers=512,
        scalars=800,
        scalar_step=16,
        shared=shared << 10,
        shared_step=shared_step,
        shared_reserved=0,
        max_shared=shared << 10,
        static_shared=shared << 10,
        source=_ROCM,
    )


def _rdna(name: str) -> Arch:
    return Arch(
        name=name,
        vendor="amd",
        warp=32,
        max_warps=16,
        max_blocks=32,
        registers=1536,
        register_step=24,
        max_registers=256,
        scalars=0,
        scalar_step=1,
        shared=128 << 10,
        shared_step=1 << 10,
        shared_reserved=0,
        max_shared=64 << 10,
        static_shared=64 << 10,
        source=_ROCM,
    )


ARCHS = {
    arch.name: arch
    for arch in (
        _nvidia("sm_80", max_warps=64, max_blocks=32, shared=164),
        _nvidia("sm_90a", max_warps=64, max_blocks=32, shared=228),
        _nvidia("sm_100a", max_warps=64, max_blocks=32, shared=228),
        _nvidia("sm_120a", max_warps=48, max_blocks=24, shared=100),
        _cdna("gfx90a", shared=64, shared_step=512),
        _cdna("gfx942", shared=64, shared_step=512),
        _cdna("gfx950", shared=160, shared_step=1280),
        _rdna("gfx1100"),
        _rdna("gfx1201"),
    )
}
