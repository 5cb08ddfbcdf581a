"""How many workers an op forks, and which tiles each of them takes."""
from max.algorithm import sync_parallelize
from max.runtime.asyncrt import parallelism_level
from std.utils.numerics import FlushDenormals

comptime WORTH_FORKING = 256 * 1024
"""Multiply-adds below which one thread is done before a fork-join (5 to 8 us)
would be."""


@always_inline
def worker_count(tiles: Int, work: Int) -> Int:
    """Workers for `tiles` tiles that are `work` multiply-adds in all."""
    if work < WORTH_FORKING:
        return 1
    return max(1, min(tiles, parallelism_level(None)))


@always_inline
def first_tile(worker: Int, workers: Int, tiles: Int) -> Int:
    """Start of a worker's contiguous share; the share ends where the next
    worker's starts."""
    return worker * tiles // workers


@always_inline
def fork[F: def(Int) -> None](share: F, workers: Int):
    """Calls share(0) ... share(workers - 1) at the same time.

    The pool's threads flush subnormals to zero, and so does a single worker,
    which runs on the caller's thread: bits do not depend on how many there are.
    """
    if workers == 1:
        with FlushDenormals():
            share(0)
    else:
        sync_parallelize(share, workers)
