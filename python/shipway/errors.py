"""Failures a user can cause or cure, each one line that says what to do, each with its exit code."""

import contextlib
import os
import shlex
import sys
from pathlib import Path

_LONGEST_LINE = 1000


class ShipwayError(Exception):
    """Bad usage or bad input (exit code 2). The message is one line: what is wrong and what to do.

    What a damaged file holds may be quoted: control characters count as spaces and a long line is cut.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        cut = message[:_LONGEST_LINE] + (" ..." if len(message) > _LONGEST_LINE else "")
        super().__init__("".join(c if c.isprintable() else " " for c in cut))


class CannotRunError(ShipwayError):
    """This machine or environment lacks something (exit code 3). The message says what would make it run."""

    exit_code = 3


def program() -> str:
    """Returns what a command begins with as it is typed: in a checkout, or anywhere."""
    return "./dev" if "SHIPWAY_DEV" in os.environ else "shipway"


def this_python(arguments: str) -> str:
    """Returns the command line that gives ``arguments`` to the Python in use, as it is typed in the current folder.

    What a message asks the user to install must land in this environment, whichever ``python`` and ``pip`` the shell
    finds: ``this_python("-m pip install max")`` is ``.venv/bin/python -m pip install max`` beside that ``.venv``.
    """
    python = Path(sys.executable)
    with contextlib.suppress(OSError, ValueError):  # the folder is gone, or the Python is not below it
        python = python.relative_to(Path.cwd())
    return f"{shlex.quote(str(python))} {arguments}"
