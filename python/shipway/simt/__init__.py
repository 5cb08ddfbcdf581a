"""Runs Mojo's device LLVM IR on the CPU, every GPU thread a fiber, and reports what a GPU would only do sometimes.

``device.Device`` is the door. ``ir`` parses the IR, ``literals`` and ``retarget`` turn it into x86-64 or AArch64 IR in
which every memory access and every device intrinsic is a call into the runtime (``runtime/*.c``), ``kernel`` compiles
it, ``intrinsics.toml`` says what each intrinsic means and which vendor document says so.
"""
