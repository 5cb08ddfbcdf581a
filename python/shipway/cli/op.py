"""``shipway op``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from shipway.cli.options import Json, Threads, comma_list
from shipway.cli.progress import progress
from shipway.errors import ShipwayError
from shipway.measure.result import write_json

if TYPE_CHECKING:
    from shipway.measure.op_bench import Entry, OpBench, OpResult, OpSettings


def op(
    name: Annotated[str, typer.Argument(help="An op of the catalogue, such as linear or attention_decode.")],
    impl: Annotated[str, typer.Option(help="Implementations, separated by commas; all of the op's if empty.")] = "",
    shape: Annotated[
        str, typer.Option(help="Dims to change from the default model's, such as T=8,K=960; then only that shape.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="Activation dtypes, separated by commas.")] = "f32,bf16",
    watch: Annotated[
        bool, typer.Option("--watch", help="Run again whenever a file of mojo/ or graphs/ is saved.")
    ] = False,
    time_edit: Annotated[
        bool, typer.Option("--time-edit", help="Time an edit of the Mojo kernel, made in a copy, to its line.")
    ] = False,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Judge one op against float64 and time it, by every implementation that runs here, beside this machine's limit.

    Exits with 1 when an implementation fails or breaks, or the timed edit takes too long, with 3 when none can run.
    """
    from shipway.api import check_threads
    from shipway.measure.op_bench import OpBench, OpSettings
    from shipway.measure.op_edit import copied_kernels

    if watch and time_edit:
        raise ShipwayError("--watch and --time-edit exclude each other: give one")
    settings = OpSettings(name, comma_list(impl), comma_list(dtype), _dims(shape), check_threads(threads))
    settings.check()
    if time_edit:
        if settings.implementations and "mojo" not in settings.implementations:
            raise ShipwayError("--time-edit times the mojo line: put mojo among the implementations")
        with copied_kernels() as kernels, progress() as show, OpBench(settings, show, str(kernels)) as bench:
            result = _edited(settings, bench, kernels)
    elif watch:
        with progress() as show, OpBench(settings, show) as bench:
            _watch(settings, bench, json)
    else:
        with progress() as show, OpBench(settings, show) as bench:
            result = bench.run()
    _show(settings, result, json)
    raise typer.Exit(_exit_code(settings, result))


_LARGEST_DIM = 1 << 20


def _dims(text: str) -> dict[str, int]:
    """Reads ``"T=1,N=576"``."""
    dims = {}
    for part in comma_list(text):
        dim, _, value = part.partition("=")
        try:
            dims[dim.strip()] = size = int(value)
        except ValueError:
            raise ShipwayError(f"--shape takes dims such as T=1,K=576, not {part!r}") from None
        if not 0 <= size <= _LARGEST_DIM:
            raise ShipwayError(f"--shape: {part} is not in 0..{_LARGEST_DIM}")
    return dims


def _asked(settings: OpSettings, entry: Entry) -> bool:
    """Whether an entry was asked for; the baseline is timed in any case."""
    return not settings.implementations or entry["implementation"] in settings.implementations


def _show(settings: OpSettings, result: OpResult, json: Path | None) -> None:
    from shipway.report.op_table import print_op

    try:  # neither a file that cannot be written nor a reader that went away may lose the other
        print_op(result, lambda entry: _asked(settings, entry), sys.stdout)
        sys.stdout.flush()
    finally:
        if json is not None:
            write_json(json, result)


def _watch(settings: OpSettings, bench: OpBench, json: Path | None) -> NoReturn:
    """Runs for every change of the sources, until Ctrl-C."""
    from shipway.measure.op_edit import changed, kernel_folders, snapshot, wait_for_change

    folders = kernel_folders()
    before = snapshot(folders)
    while True:
        _show(settings, bench.run(), json)
        print("waiting for a change of mojo/ or graphs/; Ctrl-C ends it", file=sys.stderr)
        now = wait_for_change(folders, before)
        print(f"saved: {', '.join(path.name for path in changed(before, now))}", file=sys.stderr)
        before = now
        bench.sources_changed()


def _edited(settings: OpSettings, bench: OpBench, kernels: Path) -> OpResult:
    """Runs once, saves an edit of the kernel, and runs again as :func:`_watch` does."""
    from shipway.measure.op_edit import LIMIT_S, edit, kernel_file, snapshot, wait_for_change

    first = bench.run()
    if _exit_code(settings, first):
        return first
    folders = (kernels,)
    before = snapshot(folders)
    file = kernel_file(settings.op)
    edit(kernels / file)
    saved = time.perf_counter()
    wait_for_change(folders, before)
    bench.sources_changed()
    result = bench.run()
    seconds = time.perf_counter() - saved
    result["time_edit"] = {"file": str(file), "seconds": seconds, "limit_s": LIMIT_S, "held": seconds <= LIMIT_S}
    return result


def _exit_code(settings: OpSettings, result: OpResult) -> int:
    """Returns 1 if an implementation failed or an edit took too long, 3 if none ran, else 0."""
    statuses = {entry["status"] for entry in result["entries"] if _asked(settings, entry)}
    if statuses & {"fail", "failed"} or (result["time_edit"] is not None and not result["time_edit"]["held"]):
        return 1
    return 0 if "ok" in statuses else 3
