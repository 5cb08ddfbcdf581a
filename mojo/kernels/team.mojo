"""Workers that stay together through several phases of one op.

A fork-join costs 5 to 8 us, a barrier between workers that already run 0.2 us.
"""
from std.atomic import Atomic
from std.ffi import external_call
from std.time import perf_counter_ns

comptime CLOSED = Int64(1) << 32
"""Bit of `Team.members` that says nobody may join any more."""
comptime JOIN_NS = 1_000_000
"""Nanoseconds the first members wait for the rest of the team."""
comptime SPINS = 2000
"""Polls before a waiting worker gives its core away: whoever it waits for may
need that core."""


struct Waiting(Movable):
    """Polls of one wait."""

    var polls: Int

    def __init__(out self):
        self.polls = 0

    @always_inline
    def poll(mut self):
        self.polls += 1
        if self.polls % SPINS == 0:
            _ = external_call["sched_yield", Int32]()


struct Team(Movable):
    """A team of those workers that came: at most `wanted`, at least one.

    A worker that the pool starts late finds the team closed and has nothing to
    do. So no member ever waits for a worker that cannot run, however many
    threads the pool has and whoever else uses it.
    """

    var wanted: Int64
    var members: Atomic[Int64]
    var arrived: Atomic[Int64]

    def __init__(out self, wanted: Int):
        self.wanted = Int64(wanted)
        self.members = Atomic[Int64](0)
        self.arrived = Atomic[Int64](0)

    def join(mut self) -> Int:
        """Waits until the team is complete or closed.

        Returns:
            This worker's number, counted from 0, or -1 if it came too late.
        """
        var rank = self.members.load()
        while True:
            if rank >= CLOSED:
                return -1
            if self.members.compare_exchange(rank, rank + 1):
                break
        var waiting = Waiting()
        var until = perf_counter_ns() + JOIN_NS
        while True:
            var seen = self.members.load()
            if seen >= CLOSED:
                return Int(rank)
            if seen == self.wanted or perf_counter_ns() > until:
                _ = self.members.compare_exchange(seen, seen | CLOSED)
            else:
                waiting.poll()

    def size(self) -> Int:
        """Members of the closed team."""
        return Int(self.members.load() & (CLOSED - 1))

    @always_inline
    def wait(mut self, mut phase: Int):
        """Waits until every member has called this for `phase`; counts it."""
        phase += 1
        var goal = Int64(self.size() * phase)
        _ = self.arrived.fetch_add(1)
        var waiting = Waiting()
        while self.arrived.load() < goal:
            waiting.poll()
