"""``shipway``: how every command ends.

Exit codes: 0 all held, 1 a verdict was missed or something broke, 2 usage or bad input, 3 cannot run here; 130 after
Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, 141 when the reader of the output went away.

Imports next to nothing before :func:`main` runs, so that Ctrl-C is answered from the start.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TextIO, cast

_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "the terminal is gone"}
_AGAIN_S = 3.0
_answered = -math.inf  # when the last of them was, on time.monotonic's clock


class _Signalled(BaseException):
    """One of :data:`_SIGNALS`; Typer would turn a KeyboardInterrupt into an exit without a word."""

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)


class _OutputGone(Exception):
    """The reader of stdout closed it; Typer would turn a BrokenPipeError into exit code 1."""


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the process at once, while nothing is open yet: an exception within an import may be lost in there."""
    os.write(2, f"shipway: {_SIGNALS[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)


def _unwind(number: int, frame: FrameType | None) -> None:
    """Lets everything that is open end in order; pressed again within seconds, Ctrl-C does not disturb that."""
    global _answered
    before, _answered = _answered, time.monotonic()
    if _answered - before > _AGAIN_S:
        raise _Signalled(number)


def _answer(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup and background jobs of scripts ignore some
            signal.signal(number, handler)


class _Stream:
    """A standard stream whose failures are told from those of other files. What it can no longer write goes nowhere."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]) -> None:
        self._stream, self._failed = stream, failed

    def write(self, text: str) -> int:
        """Writes; a failure is given to ``failed``."""
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flushes; a failure is given to ``failed``."""
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, call: Callable[..., object], *arguments: str) -> None:
        try:
            call(*arguments)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # for the interpreter's own flush at exit
            self._failed(error)


def _stdout_failed(error: OSError) -> None:
    from shipway.errors import ShipwayError

    if isinstance(error, BrokenPipeError):
        raise _OutputGone from error
    raise ShipwayError(f"cannot write standard output: {error.strerror}") from error


def _open_missing() -> None:
    """Opens /dev/null for standard descriptors that are closed: the next file to be opened would become one of them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest one that is free
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")  # print() would take None for stdout


def _say(line: str) -> None:
    print(f"shipway: {line}", file=sys.stderr)


def _broken(error: BaseException) -> None:
    """One line for an error nobody foresaw; its traceback goes to a file."""
    import traceback

    from shipway.client import new_log
    from shipway.errors import ShipwayError

    first_line = (str(error).strip() or "no message").splitlines()[0]
    try:
        log = new_log("shipway")
        log.write_text(traceback.format_exc())
    except ShipwayError as unwritable:
        _say(f"broke: {type(error).__name__}: {first_line}; no traceback kept: {unwritable}")
    else:
        _say(f"broke: {type(error).__name__}: {first_line}; traceback: {log}")


def _run() -> int:
    """Runs the command line; returns its exit code."""
    from typer.exceptions import TyperException
    from typer.main import get_group

    from shipway.cli.app import app
    from shipway.errors import ShipwayError, program

    _answer(_unwind)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may choose characters that the terminal cannot show
    try:
        if sys.stdout is None:
            raise ShipwayError("standard output is closed: redirect it to a file or to /dev/null")
        with contextlib.redirect_stdout(cast(TextIO, _Stream(sys.stdout, _stdout_failed))):
            try:
                return app(prog_name=program(), standalone_mode=False) or 0
            finally:
                sys.stdout.flush()
    except ShipwayError as error:
        _say(" ".join(str(error).split()))
        return error.exit_code
    except TyperException as error:
        if said := error.format_message():  # nothing where the help has been printed instead
            named = [name for name in sys.argv[1:2] if name in get_group(app).commands]  # not every error knows it
            _say(f"{said.rstrip('.')}: see {' '.join([program(), *named])} -h")
        return error.exit_code
    except _OutputGone:
        return 141
    except (_Signalled, SystemExit):
        raise
    except BaseException as error:  # panics of Rust libraries are no Exceptions
        _broken(error)
        return 1


def main() -> None:
    """Runs the command line and ends the process with its exit code; never with a traceback."""
    _answer(_leave)
    os.environ.setdefault("MODULAR_TELEMETRY_ENABLED", "false")
    os.environ.setdefault("MODULAR_CRASH_REPORTING_ENABLED", "false")
    _open_missing()
    with contextlib.redirect_stderr(cast(TextIO, _Stream(sys.stderr, lambda error: None))):
        try:
            code = _run()
        except _Signalled as signalled:
            _say(_SIGNALS[signalled.number])
            code = 128 + signalled.number
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interpreter's own end would print a traceback
    sys.exit(code)
