"""How many workers an op forks, and which tiles each of them takes."""
from max.runtime.asyncrt import parallelism_level

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
