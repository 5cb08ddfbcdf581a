"""USD per hour of the machine a result is priced at, from the table ``bench/prices.toml``."""

from __future__ import annotations

import math
import platform
import tomllib
from dataclasses import dataclass
from importlib.resources import files

from shipway.errors import ShipwayError


@dataclass(frozen=True)
class Price:
    """A machine's price and where it comes from."""

    usd_per_hour: float
    machine: str
    source: str


def choose_price(threads: int, override: str | None) -> Price:
    """Returns the price of the cheapest listed machine like this one, or of ``override``.

    Args:
        threads: Threads in use; the machine needs as many vCPUs.
        override: USD per hour, or the name of a row of the table.

    Raises:
        ShipwayError: The override is neither a positive number nor a row.
    """
    table = tomllib.loads(files("shipway").joinpath("data/prices.toml").read_text())
    machines = table["machines"]

    def listed(name: str) -> Price:
        return Price(machines[name]["usd_per_hour"], name, table["sources"][name.split(".")[0]])

    if override is not None and override in machines:
        return listed(override)
    if override is not None:
        try:
            usd = float(override)
        except ValueError:
            usd = math.nan
        if not (math.isfinite(usd) and usd > 0):
            raise ShipwayError(f"--price takes USD per hour or one of {', '.join(machines)}, not {override!r}")
        return Price(usd, "given with --price", "the command line")
    fitting = [
        (row["usd_per_hour"], name)
        for name, row in machines.items()
        if row["architecture"] == platform.machine() and row["vcpus"] >= threads
    ]
    if not fitting:
        raise ShipwayError(
            f"bench/prices.toml lists no {platform.machine()} machine with {threads} vCPUs: give --price USD_PER_HOUR"
        )
    return listed(min(fitting)[1])


def usd_per_million(usd_per_hour: float, tokens_per_s: float) -> float:
    """Returns $/Mtok = price per hour / (tokens/s * 3600) * 1e6."""
    return usd_per_hour / (tokens_per_s * 3600) * 1e6
