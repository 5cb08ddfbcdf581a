"""A team is whoever came in time, and nobody waits for the rest."""
from std.testing import TestSuite, assert_equal, assert_true
from max.algorithm import sync_parallelize
from max.runtime.asyncrt import parallelism_level
from kernels.team import Team


def test_a_worker_that_nobody_joins_goes_on_alone() raises:
    var team = Team(2)
    assert_equal(team.join(), 0)
    assert_equal(team.size(), 1)
    var phase = 0
    for _ in range(3):
        team.wait(phase)
    assert_equal(phase, 3)


def test_who_comes_late_has_nothing_to_do() raises:
    var team = Team(2)
    assert_equal(team.join(), 0)
    assert_equal(team.join(), -1)
    assert_equal(team.size(), 1)


def test_every_member_sees_what_all_wrote_before_a_barrier() raises:
    comptime PHASES = 500
    var workers = parallelism_level(None)
    var written = List[Int](length=workers, fill=0)
    var wrong = List[Int](length=workers, fill=0)
    var ranks = List[Int](length=workers, fill=0)
    var wp = written.unsafe_ptr()
    var ep = wrong.unsafe_ptr()
    var rp = ranks.unsafe_ptr()
    var team = Team(workers)

    def share(_worker: Int) {mut team, imm}:
        var worker = team.join()
        if worker < 0:
            return
        rp[unsafe_offset=worker] += 1
        var phase = 0
        for step in range(1, PHASES):
            wp[unsafe_offset=worker] = step
            team.wait(phase)
            for other in range(team.size()):
                if wp[unsafe_offset=other] != step:
                    ep[unsafe_offset=worker] += 1
            team.wait(phase)

    sync_parallelize(share, workers)
    assert_true(1 <= team.size() <= workers)
    for worker in range(workers):
        assert_equal(wrong[worker], 0)
        assert_equal(ranks[worker], 1 if worker < team.size() else 0)


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
