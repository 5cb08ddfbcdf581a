"""``shipway``: the commands, and how each of them ends.

Exit codes: 0 all held, 1 a verdict was missed or something broke, 2 usage or bad input, 3 cannot run here; 130 after
Ctrl-C, 141 when the reader of the output went away.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import typer

from shipway.cli.bench import bench
from shipway.cli.bench_serve import bench_serve
from shipway.cli.cache import cache
from shipway.cli.check import check
from shipway.cli.compile import compile
from shipway.cli.doctor import doctor
from shipway.cli.generate import generate
from shipway.cli.inspect import inspect
from shipway.cli.load_time import load_time
from shipway.cli.op import op
from shipway.cli.report import report
from shipway.cli.routes import routes
from shipway.cli.serve import serve
from shipway.errors import ShipwayError

app = typer.Typer(
    help="Run one model through several routes, judge each against float64, time them on this machine.",
    epilog="Exit codes: 0 all held, 1 a verdict missed or something broke, 2 usage or bad input, 3 cannot run here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _OutputGone(Exception):
    """The reader of stdout closed it; Typer would turn a BrokenPipeError into exit code 1."""


class _Interrupted(Exception):
    """Ctrl-C; Typer would turn a KeyboardInterrupt into an exit without a word."""


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except BrokenPipeError as error:
            raise _OutputGone from error
        except KeyboardInterrupt as error:
            raise _Interrupted from error

    return run


COMMANDS = (
    bench,
    generate,
    serve,
    bench_serve,
    compile,
    load_time,
    inspect,
    routes,
    check,
    op,
    doctor,
    report,
    cache,
)
for command in COMMANDS:
    app.command()(_guarded(command))


def _say(line: str) -> None:
    print(f"shipway: {line}", file=sys.stderr)


def _broken(error: Exception) -> None:
    """One line for an error nobody foresaw; its traceback goes to a file."""
    from shipway.client import new_log

    first_line = (str(error).strip() or "no message").splitlines()[0]
    try:
        log = new_log("shipway")
        log.write_text(traceback.format_exc())
    except ShipwayError as unwritable:
        _say(f"broke: {type(error).__name__}: {first_line}; no traceback kept: {unwritable}")
    else:
        _say(f"broke: {type(error).__name__}: {first_line}; traceback: {log}")


def main() -> None:
    """Runs the command line and ends the process with its exit code; never with a traceback."""
    os.environ.setdefault("MODULAR_TELEMETRY_ENABLED", "false")
    os.environ.setdefault("MODULAR_CRASH_REPORTING_ENABLED", "false")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may choose characters that the terminal cannot show
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except ShipwayError as error:
        _say(" ".join(str(error).split()))
        code = error.exit_code
    except (KeyboardInterrupt, _Interrupted):
        _say("interrupted")
        code = 130
    except (BrokenPipeError, _OutputGone):
        # What is still buffered has no reader: let the interpreter's own flush at exit go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except Exception as error:
        _broken(error)
        code = 1
    sys.exit(code)
