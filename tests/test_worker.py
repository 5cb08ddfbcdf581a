import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import pytest

import fake_routes
from processes import eventually, gone
from shipway.channel import Channel, ChannelClosed
from shipway.client import CacheFullError, Worker, WorkerError
from shipway.errors import CannotRunError, ShipwayError
from shipway.routes.route import RunSpec
from shipway.sampler import Sampling
from shipway.worker import choose_cpus

SPEC = RunSpec("nowhere", "f32", "f32")
pytestmark = pytest.mark.usefixtures("own_cache")


def start(name: str, **options: float) -> Worker:
    return Worker(fake_routes.info(name), threads=1, **options)


def test_channel_carries_arrays_of_every_shape_unchanged() -> None:
    left, right = map(Channel, socket.socketpair())
    arrays = [
        np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
        np.zeros((0, 7), np.float32),
        np.array(3.5, np.float64),
        np.arange(5, dtype=np.int32),
    ]
    left.send({"arrays": arrays, "number": np.float32(0.5)})
    received = right.receive()
    assert received["number"] == 0.5
    for sent, got in zip(arrays, received["arrays"], strict=True):
        assert got.dtype == sent.dtype
        assert got.shape == sent.shape
        assert np.array_equal(got, sent)


def test_channel_leaves_no_descriptor_behind() -> None:
    left, right = map(Channel, socket.socketpair())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        left.send({"array": np.ones(100_000, np.float32)})
        assert right.receive()["array"].sum() == 100_000
    assert len(os.listdir("/proc/self/fd")) == before


def test_channel_says_when_the_other_side_is_gone() -> None:
    left, right = map(Channel, socket.socketpair())
    right.close()
    with pytest.raises(ChannelClosed):
        left.receive()


def test_protocol_answers_every_call() -> None:
    with start("Good") as worker:
        prepared = worker.prepare(SPEC)
        assert prepared.load_s == 0.1
        assert prepared.notes == ("fake",)
        expected = [fake_routes.following(4)]
        assert worker.call("prefill", tokens=[[1, 4], [2, 4]]) == expected * 2
        assert worker.call("decode", tokens=expected) == [fake_routes.following(expected[0])]
        assert worker.call("logits").argmax(axis=1).tolist() == [fake_routes.following(expected[0])]
        scores = worker.call("score", tokens=[3, 1, 2])
        assert scores.dtype == np.float32
        assert scores[:, 0].tolist() == [3, 1, 2]
        memory = worker.call("peak_memory")
        assert memory["peak"] >= memory["resident"] > 1 << 20
        assert worker.call("reset") is None


def test_what_a_message_cannot_carry_leaves_the_worker_usable() -> None:
    with start("Good") as worker:
        worker.prepare(SPEC)
        endless: list[object] = []
        endless.append(endless)
        for value in (object(), {1, 2}, endless, b"bytes"):
            with pytest.raises((TypeError, ValueError)):
                worker.call("prefill", tokens=value)
            with pytest.raises((TypeError, ValueError)):
                next(worker.generate(value, 3, fake_routes.VOCAB, [], Sampling()))  # type: ignore[arg-type]
            assert worker.call("prefill", tokens=[[4]]) == [fake_routes.following(4)]


def test_run_times_every_token_and_ignores_eos() -> None:
    with start("Slow") as worker:
        worker.prepare(SPEC)
        run = worker.call("run", tokens=[[1]], new_tokens=5)
    ids = [step[0] for step in run["ids"]]
    assert ids == [fake_routes.following(token) for token in [1, *ids[:-1]]]
    times = np.array([run["start"], *run["times"]])
    assert len(times) == 6
    assert (np.diff(times[1:]) >= 0.02).all()
    assert np.diff(times)[0] < 0.02  # the prefill does not sleep: TTFT holds no decode


def test_generate_stops_at_eos_and_at_length() -> None:
    first, second = fake_routes.following(1), fake_routes.following(fake_routes.following(1))
    with start("Good") as worker:
        worker.prepare(SPEC)
        assert list(worker.generate([1], 5, fake_routes.VOCAB, [second], Sampling())) == [
            (first, None),
            (second, "eos"),
        ]
        assert list(worker.generate([1], 2, fake_routes.VOCAB, [], Sampling())) == [(first, None), (second, "length")]


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_generation_closed_early_leaves_the_worker_usable(taken: int) -> None:
    with start("Slow") as worker:
        worker.prepare(SPEC)
        for _ in range(3):
            tokens = worker.generate([1], 3, fake_routes.VOCAB, [], Sampling())
            for _ in range(taken):
                next(tokens)
            tokens.close()
            assert worker.call("prefill", tokens=[[4]]) == [fake_routes.following(4)]


def test_whoever_has_the_last_token_has_a_free_worker() -> None:
    with start("Slow") as worker:
        worker.prepare(SPEC)
        tokens = worker.generate([1], 2, fake_routes.VOCAB, [], Sampling())
        assert [next(tokens)[1], next(tokens)[1]] == [None, "length"]
        assert worker.call("prefill", tokens=[[4]]) == [fake_routes.following(4)]
        assert list(tokens) == []


@pytest.mark.parametrize("leave", [lambda tokens: tokens.close(), lambda tokens: None], ids=["closed", "dropped"])
def test_leaving_a_finished_generation_does_not_end_the_next(leave: Callable[[Generator], object]) -> None:
    with start("Slow") as worker:
        worker.prepare(SPEC)
        tokens = worker.generate([1], 2, fake_routes.VOCAB, [], Sampling())
        next(tokens), next(tokens)
        following = worker.generate([1], 9, fake_routes.VOCAB, [], Sampling())
        next(following)
        leave(tokens)
        del tokens
        assert [finish for _, finish in following] == [None] * 7 + ["length"]


def test_second_call_during_a_generation_is_refused() -> None:
    with start("Slow") as worker:
        worker.prepare(SPEC)
        tokens = worker.generate([1], 50, fake_routes.VOCAB, [], Sampling())
        next(tokens)
        with pytest.raises(ShipwayError, match="still generating"):
            worker.call("reset")


class Interrupting(threading.Timer):
    """Sends this process SIGINT after ``seconds``, as Ctrl-C does."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))


@pytest.mark.parametrize(
    "work",
    [
        lambda worker: worker.call("run", tokens=[[1]], new_tokens=50),
        lambda worker: list(worker.generate([1], 500, fake_routes.VOCAB, [], Sampling())),
    ],
    ids=["run", "generate"],
)
def test_interrupted_call_leaves_the_worker_usable(work: Callable[[Worker], object]) -> None:
    with start("Slow") as worker:
        worker.prepare(SPEC)
        for _ in range(2):
            Interrupting(0.1).start()
            with pytest.raises(KeyboardInterrupt):
                work(worker)
            assert worker.call("prefill", tokens=[[4]]) == [fake_routes.following(4)]
            assert len(list(worker.generate([1], 3, fake_routes.VOCAB, [], Sampling()))) == 3


def test_exception_of_the_consumer_leaves_the_worker_usable() -> None:
    with start("Slow") as worker:
        worker.prepare(SPEC)
        tokens = worker.generate([1], 50, fake_routes.VOCAB, [], Sampling())
        next(tokens)
        with pytest.raises(ZeroDivisionError):
            tokens.throw(ZeroDivisionError())
        assert worker.call("prefill", tokens=[[4]]) == [fake_routes.following(4)]


def test_interrupt_within_a_message_is_said_at_every_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Channel) -> None:
        raise KeyboardInterrupt

    with start("Good") as worker:
        worker.prepare(SPEC)
        monkeypatch.setattr(Channel, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.call("reset")
        monkeypatch.undo()
        for _ in range(2):
            with pytest.raises(WorkerError, match="in the middle of a message and was ended"):
                worker.call("reset")


def test_worker_killed_while_generating_is_said_to_have_died_at_every_later_call() -> None:
    with start("Slow") as worker:
        worker.prepare(SPEC)
        tokens = worker.generate([1], 50, fake_routes.VOCAB, [], Sampling())
        next(tokens)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="died of SIGKILL during `generate`"):
            list(tokens)
        for _ in range(2):
            with pytest.raises(WorkerError, match="died of SIGKILL"):
                worker.call("reset")


def test_worker_killed_under_an_iterator_that_is_then_dropped_is_said_to_have_died() -> None:
    with start("Slow") as worker:
        worker.prepare(SPEC)
        tokens = worker.generate([1], 50, fake_routes.VOCAB, [], Sampling())
        next(tokens)
        os.kill(worker.pid, signal.SIGKILL)
        assert eventually(lambda: gone(worker.pid))
        tokens.close()
        with pytest.raises(WorkerError, match="died of SIGKILL"):
            worker.call("reset")


def test_closed_worker_says_so_at_every_call() -> None:
    worker = start("Slow")
    worker.prepare(SPEC)
    suspended = worker.generate([1], 50, fake_routes.VOCAB, [], Sampling())
    next(suspended)
    worker.close()
    calls: list[Callable[[], object]] = [
        lambda: worker.call("reset"),
        lambda: list(worker.generate([1], 5, fake_routes.VOCAB, [], Sampling())),
    ]
    for call in [lambda: next(suspended), *calls, *calls]:
        with pytest.raises(ShipwayError, match="is closed"):
            call()
    worker.close()


def test_full_disk_is_named_when_a_route_breaks_while_preparing(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    with start("Unprepared") as worker:
        with pytest.raises(WorkerError, match=r"RuntimeError: Failed to compile"):
            worker.prepare(SPEC)
        monkeypatch.setattr("shipway.client.shutil.disk_usage", lambda path: usage._replace(free=1_000_000))
        with pytest.raises(CacheFullError, match=r"disk of the cache \S+ has 1.0 MB free.*Failed to compile") as caught:
            worker.prepare(SPEC)
    assert caught.value.exit_code == 2


def test_padding_rows_of_the_vocabulary_are_never_chosen() -> None:
    allowed = fake_routes.following(1)  # as a vocabulary size it leaves out the token the route favours
    with start("Good") as worker:
        worker.prepare(SPEC)
        for sampling in (Sampling(), Sampling(temperature=2.0)):
            for token, _ in worker.generate([1], 20, allowed, [], sampling):
                assert token < allowed


def test_output_of_a_route_does_not_disturb_the_protocol() -> None:
    with start("Chatty") as worker:
        worker.prepare(SPEC)
        assert worker.call("prefill", tokens=[[4]]) == [fake_routes.following(4)]


def test_errors_of_the_user_cross_unchanged() -> None:
    with start("Refuses") as worker, pytest.raises(ShipwayError, match=r"^nowhere is not for this route$") as caught:
        worker.prepare(SPEC)
    assert type(caught.value) is ShipwayError
    with start("Lacks") as worker, pytest.raises(CannotRunError, match=r"^needs a GPU: plug one in$"):
        worker.prepare(SPEC)


def test_unforeseen_exception_is_one_line_and_its_traceback_is_kept() -> None:
    with start("Raises") as worker:
        worker.prepare(SPEC)
        with pytest.raises(WorkerError) as caught:
            worker.call("decode", tokens=[1])
    message = str(caught.value)
    assert "\n" not in message
    assert "RuntimeError: bad rank" in message
    assert str(worker.log) in message
    assert "Traceback" in worker.log.read_text()
    assert "in decode" in worker.log.read_text()


def test_death_by_signal_names_it_and_what_was_printed_last() -> None:
    with start("Segfaults") as worker:
        worker.prepare(SPEC)
        with pytest.raises(WorkerError) as caught:
            worker.call("run", tokens=[[1]], new_tokens=4)
    message = str(caught.value)
    assert "SIGSEGV" in message
    assert "`run`" in message
    assert "kernel: tile 7 out of range" in message
    assert worker.log.exists()


def test_unknown_factory_is_an_error_with_its_reason() -> None:
    with start("NoSuchRoute") as worker, pytest.raises(WorkerError, match="NoSuchRoute"):
        worker.prepare(SPEC)


def test_hanging_worker_is_ended_after_the_limit() -> None:
    worker = start("Hangs", timeout_s=1.0)
    with worker:
        worker.prepare(SPEC)
        with pytest.raises(WorkerError, match="within 1 s"):
            worker.call("prefill", tokens=[[1]])
        assert gone(worker.pid)


def test_paused_worker_takes_no_cpu_and_resumes() -> None:
    with start("Good") as worker:
        worker.prepare(SPEC)
        worker.pause()
        assert eventually(lambda: Path(f"/proc/{worker.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
        worker.resume()
        assert worker.call("prefill", tokens=[[4]]) == [fake_routes.following(4)]
        worker.pause()
    assert gone(worker.pid)


def test_log_is_removed_after_a_clean_end(own_cache: Path) -> None:
    with start("Chatty") as worker:
        worker.prepare(SPEC)
        worker.call("prefill", tokens=[[4]])
    assert list((own_cache / "logs").iterdir()) == []


def test_log_folder_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHIPWAY_CACHE", str(tmp_path / "file"))
    with pytest.raises(ShipwayError, match="SHIPWAY_CACHE"):
        start("Good")


def test_affinity_and_environment_are_set_before_the_route_is_imported(own_cache: Path) -> None:
    with start("Affinity") as worker:
        assert worker.call("affinity") == choose_cpus(1)
        variables = worker.call("variables")
    assert variables["MODULAR_TELEMETRY_ENABLED"] == "false"
    assert variables["MODULAR_CRASH_REPORTING_ENABLED"] == "false"
    assert variables["MODULAR_CACHE_DIR"] == str(own_cache / "modular")
    assert variables["OMP_NUM_THREADS"] == "1"


def test_worker_module_imports_no_compiler_and_no_numpy() -> None:
    code = (
        "import sys, shipway.worker; print(*[m for m in ('numpy', 'torch', 'max', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


PARENT = textwrap.dedent("""
    import sys, time
    import fake_routes
    from shipway.client import Worker
    from shipway.routes.route import RunSpec

    worker = Worker(fake_routes.info("Hangs"), threads=1)
    worker.prepare(RunSpec("nowhere", "f32", "f32"))
    if sys.argv[1] == "stopped":
        worker.pause()
    print(worker.pid, flush=True)
    if sys.argv[1] == "busy":
        with worker:
            worker.call("prefill", tokens=[[1]])
    time.sleep(3600)
""")


@pytest.mark.parametrize("state", ["idle", "busy", "stopped"])
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_the_driver(state: str, ending: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        if state == "busy":
            time.sleep(0.3)
        assert not gone(pid)
        parent.send_signal(ending)
        parent.wait(timeout=20)
        assert eventually(lambda: gone(pid))
    finally:
        parent.kill()
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)
