"""The driver's side of a worker: starts it, calls it, stops and resumes it, and never leaves it behind."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shipway.channel import Channel, ChannelClosed, Frame, frame
from shipway.errors import CannotRunError, ShipwayError
from shipway.model.resolve import cache_dir
from shipway.routes.route import Prepared, RouteInfo, RunSpec
from shipway.sampler import Sampling

CALL_TIMEOUT_S = 1800.0  # a cold compile of a stock MAX graph takes minutes on a loaded machine
_KEPT_LOGS = 50
_SHORT_OF_SPACE = 64 << 20  # bytes; compilers write more than this and say little when they cannot
_log_number = itertools.count()


class WorkerError(ShipwayError):
    """A route broke: it raised something unforeseen, died, or did not answer (exit code 1)."""

    exit_code = 1


class CacheFullError(ShipwayError):
    """A route broke while preparing, on a machine whose cache has no room left (exit code 2)."""


def new_log(name: str) -> Path:
    """Returns the path of a new log file, and removes the oldest beyond the newest fifty."""
    folder = cache_dir() / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("*.log"))[:-_KEPT_LOGS]:
            old.unlink(missing_ok=True)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_log_number)}-{name}.log"
        path.touch()
    except OSError as error:
        raise ShipwayError(
            f"cannot write {folder} ({error.strerror}): set SHIPWAY_CACHE to a writable folder"
        ) from None
    return path


def _worker_environment(threads: int) -> dict[str, str]:
    package_parent = str(Path(__file__).resolve().parent.parent)
    search_path = [package_parent, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(search_path),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "MODULAR_CACHE_DIR": str(cache_dir() / "modular"),
        "MODULAR_TELEMETRY_ENABLED": "false",
        "MODULAR_CRASH_REPORTING_ENABLED": "false",
    }


class Worker:
    """A route in a process of its own. Use it as a context manager, or call :meth:`close`."""

    def __init__(self, info: RouteInfo, threads: int, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Starts the process; nothing is loaded yet.

        Args:
            info: The route.
            threads: CPUs the process is bound to.
            timeout_s: Seconds a call may take before the worker is killed.

        Raises:
            ShipwayError: The log folder cannot be written.
        """
        self.name = info.name
        self._timeout_s = timeout_s
        self._busy = False  # between a request and its reply
        self._abandoned = False  # nobody waits for that reply any more: the next call reads it first
        self._unusable: ShipwayError | None = None  # why there will be no further reply
        self._keep_log = False
        self.log = new_log(info.name)
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "shipway.worker", info.factory]
        command += ["--channel", str(theirs.fileno()), "--threads", str(threads)]
        try:
            with self.log.open("wb") as log:
                # A process group of its own: Ctrl-C reaches the driver only, which then ends its workers in order.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    process_group=0,
                    env=_worker_environment(threads),
                )
        finally:
            theirs.close()
        self._channel = Channel(ours)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def call(self, call: str, **arguments: Any) -> Any:
        """Sends one message of :mod:`shipway.service` and returns its value.

        Raises:
            ShipwayError: What the route raised, unchanged.
            WorkerError: The route raised anything else, its process died, or it did not answer in time.
        """
        self._await_turn()
        try:
            self._send(call, arguments)
            message = self._receive(call)
        except BaseException:
            self._abandon()
            raise
        return self._value(call, message)

    def prepare(self, spec: RunSpec) -> Prepared:
        """Loads and compiles; raises as :meth:`call`.

        Raises:
            CacheFullError: It broke, and the disk of the cache is full: what a compiler says then misleads.
        """
        try:
            value = self.call("prepare", spec=dataclasses.asdict(spec))
        except WorkerError as error:
            free = shutil.disk_usage(cache_dir()).free
            if free >= _SHORT_OF_SPACE:
                raise
            raise CacheFullError(
                f"{self.name} broke while preparing, and the disk of the cache {cache_dir()} has {free / 1e6:.1f} MB "
                f"free: make room there or set SHIPWAY_CACHE to a folder on another disk ({error})"
            ) from error
        return Prepared(**value | {"notes": tuple(value["notes"])})

    def generate(
        self, tokens: list[int], max_new: int, vocab: int, stop_ids: list[int], sampling: Sampling
    ) -> Generator[tuple[int, str | None], None, None]:
        """Yields ``(id, finish)`` as the worker chooses tokens; ``finish`` is ``"eos"`` or ``"length"`` on the last.

        Leaving it early, by closing the iterator or by an exception, tells the worker to stop. Raises as :meth:`call`.
        """
        arguments = {"tokens": tokens, "max_new": max_new, "vocab": vocab, "stop_ids": stop_ids}
        self._await_turn()
        try:
            self._send("generate", arguments | {"sampling": dataclasses.asdict(sampling)})
            while "token" in (message := self._receive("generate")) and message["finish"] is None:
                yield message["token"], None
            last = message
            if "token" in last:  # the reply is read first: whoever takes the last token has a free worker
                message = self._receive("generate")
        except BaseException:
            self._abandon("stop")
            raise
        # From here on the worker may be another's: leaving stops nothing any more.
        if "token" in last:
            yield last["token"], last["finish"]
        self._value("generate", message)

    def check_usable(self) -> None:
        """Raises why no call can be answered any more: the worker was closed, died, or was ended."""
        if self._unusable is not None:
            raise type(self._unusable)(str(self._unusable))  # not the same object: tracebacks would pile up on it

    def pause(self) -> None:
        """Stops every thread of the worker (SIGSTOP) so that it takes no CPU while another is timed; waits for it."""
        self._signal(signal.SIGSTOP)
        if self._process.returncode is None:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # an exit is left for Popen to reap

    def resume(self) -> None:
        """Lets a paused worker continue."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends the process and, when nothing went wrong, removes its log. May be called again."""
        unusable, self._unusable = self._unusable, ShipwayError(f"{self.name} is closed: load the model again")
        if self._process.returncode is None:
            self.resume()
            try:
                if self._busy and not self._abandoned:
                    self._process.kill()
                elif unusable is None:
                    self._channel.send({"call": "close"})
                # What was abandoned may be far from its end, and nobody wants it.
                self._process.wait(timeout=1 if self._abandoned else 10)
            except (ChannelClosed, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
            except BaseException:
                self._process.kill()
                raise
            if not self._keep_log:
                self.log.unlink(missing_ok=True)
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _await_turn(self) -> None:
        """Makes sure that the next reply read belongs to the next request."""
        self.check_usable()
        if self._busy and not self._abandoned:
            raise ShipwayError(f"{self.name} is still generating: finish or close the previous iterator first")
        while self._busy:
            self._receive("an interrupted call")

    def _abandon(self, *last_calls: str) -> None:
        """Stops waiting for a reply, making ``last_calls``; does nothing when the reply has come or never will."""
        if self._busy and not self._abandoned and self._unusable is None:
            self._abandoned = True
            for call in last_calls:
                with contextlib.suppress(ShipwayError):  # the next call says that the worker has died or was closed
                    self._transmit(call, frame({"call": call}))

    def _send(self, call: str, arguments: dict[str, Any]) -> None:
        encoded = frame({"call": call} | arguments)  # what no message can carry is refused before anything is sent
        self._busy = True
        self._transmit(call, encoded)

    def _transmit(self, call: str, encoded: Frame) -> None:
        try:
            self._channel.send_frame(encoded)
        except ChannelClosed:
            raise self._death(call) from None
        except BaseException:
            self._cut_off()
            raise

    def _receive(self, call: str) -> dict[str, Any]:
        self.check_usable()
        deadline = time.monotonic() + self._timeout_s
        while not self._channel.ready(0.2):
            if self._process.poll() is not None:
                raise self._death(call)
            if time.monotonic() > deadline:
                self._keep_log = True
                self._process.kill()
                self._process.wait()
                raise self._ends(
                    f"{self.name} did not answer `{call}` within {self._timeout_s:g} s and was ended; log: {self.log}"
                )
        try:
            message = self._channel.receive()
            if "token" not in message:
                self._busy = self._abandoned = False
            return message
        except ChannelClosed:
            raise self._death(call) from None
        except BaseException:
            self._cut_off()
            raise

    def _value(self, call: str, message: dict[str, Any]) -> Any:
        if "error" not in message:
            return message["ok"]
        if message["kind"] == "crash":
            self._keep_log = True
            raise WorkerError(f"{self.name} failed in `{call}`: {message['error']}; traceback: {self.log}")
        raise (CannotRunError if message["kind"] == "cannot run" else ShipwayError)(message["error"])

    def _cut_off(self) -> None:
        """Ends the process after an interrupt within a message: where the next one begins is no longer known.

        Raises what :meth:`check_usable` raises when another thread has closed the worker meanwhile.
        """
        self.check_usable()
        self._process.kill()
        self._process.wait()
        self._ends(f"{self.name} was interrupted in the middle of a message and was ended: load the model again")

    def _death(self, call: str) -> WorkerError:
        """Says how the process ended and what it printed last: some runtimes give their reason on stderr only.

        Raises what :meth:`check_usable` raises when another thread has closed the worker meanwhile.
        """
        self.check_usable()
        self._keep_log = True
        code = self._process.wait()
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        try:
            printed = self.log.read_text(errors="replace").splitlines()
        except OSError:  # the cache was cleared meanwhile
            printed = []
        lines = [line.strip() for line in printed if line.strip()]
        last = f"; last output: {' | '.join(lines[-3:])[-400:]}" if lines else ""
        return self._ends(f"{self.name} {how} during `{call}`{last}; log: {self.log}")

    def _ends(self, reason: str) -> WorkerError:
        """Makes every further call raise ``reason``; returns it as an error."""
        self._busy = self._abandoned = False
        self._unusable = error = WorkerError(reason)
        return error
