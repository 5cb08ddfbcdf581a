"""The lock-in table covers every route, dated and with sources."""

import datetime

from shipway.measure.lock_in import lock_in, lock_in_table
from shipway.routes.catalogue import ROUTES


def test_every_route_states_licence_openness_and_sources() -> None:
    table = lock_in_table()
    assert isinstance(table["dated"], datetime.date)
    for route in ROUTES:
        row = table[route]
        assert row["label"].startswith("open (" if row["source_open"] else "closed"), route
        assert row["licence"]
        assert row["compiler"]
        assert row["sources"]
        assert lock_in(route) == row["label"]


def test_unlisted_route_is_unknown_not_open() -> None:
    assert lock_in("somebody-elses") == "unknown"
