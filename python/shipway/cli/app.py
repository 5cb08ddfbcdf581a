"""The commands."""

from __future__ import annotations

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
from shipway.cli.targets import targets

app = typer.Typer(
    help="Run one model through several routes, judge each against float64, time them on this machine.",
    epilog="Exit codes: 0 all held, 1 a verdict missed or something broke, 2 usage or bad input, 3 cannot run here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
    targets,
    doctor,
    report,
    cache,
)
for command in COMMANDS:
    app.command()(command)
