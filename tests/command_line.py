"""What tests of the command line share besides the fixtures of ``conftest.py``."""

from collections.abc import Callable

Run = Callable[..., tuple[int, str, str]]  # arguments of the command line -> exit code, stdout, stderr
Fakes = Callable[..., None]


def assert_one_line(code: int, expected: int, err: str, *parts: str) -> None:
    assert code == expected, err
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in err
    for part in parts:
        assert part in err
