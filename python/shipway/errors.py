"""Failures a user can cause or cure, each one line that says what to do, each with its exit code."""


class ShipwayError(Exception):
    """Bad usage or bad input (exit code 2). The message is one line: what is wrong and what to do."""

    exit_code = 2


class CannotRunError(ShipwayError):
    """This machine or environment lacks something (exit code 3). The message says what would make it run."""

    exit_code = 3
