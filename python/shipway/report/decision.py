"""One plain paragraph: which route to ship here, per dtype, and why."""

from __future__ import annotations

from collections.abc import Callable

from shipway.measure.environment import IDLE_BUSY_SHARE
from shipway.measure.result import Entry, Result
from shipway.measure.stats import MIN_ROUNDS, ratio_per_round
from shipway.report.summary import Row, decode_speeds, prefill_speeds, summarise


def _names(rows: list[Row]) -> str:
    return " and ".join(row.entry["route"] for row in rows)


def _leaders(rows: list[Row], speeds: Callable[[Entry], dict[int, float]]) -> list[Row]:
    """Returns the fastest row, then every row whose per-round ratio to it has 1 inside its interval."""
    medians = {id(row): ratio_per_round(speeds(row.entry), speeds(rows[0].entry)) for row in rows}
    ordered = sorted(rows, key=lambda row: -(ratio.median if (ratio := medians[id(row)]) else 0.0))
    best = ordered[0]
    tied = [best]
    for row in ordered[1:]:
        ratio = ratio_per_round(speeds(best.entry), speeds(row.entry))
        if ratio is None or not ratio.excludes(1.0):
            tied.append(row)
    return tied


def _against(best: Row, rows: list[Row], speeds: Callable[[Entry], dict[int, float]]) -> str:
    """Says how much faster ``best`` is than each of ``rows``."""
    parts = []
    for row in rows:
        ratio = ratio_per_round(speeds(best.entry), speeds(row.entry))
        assert ratio is not None
        parts.append(f"{ratio.median:.2f}x {row.entry['route']} (95% interval {ratio.low:.2f} to {ratio.high:.2f})")
    return ", ".join(parts)


def _one_dtype(dtype: str, rows: list[Row], rounds: int) -> str:
    ranked = [row for row in rows if row.ranked]
    if not ranked:
        return f"In {dtype} nothing can be shipped: no route held its verdict and ran to the end."
    if len(ranked) == 1:
        row = ranked[0]
        assert row.decode is not None
        return f"In {dtype} only {row.entry['route']} qualifies, at {row.decode.median:.1f} decode tokens/s."
    if rounds < MIN_ROUNDS:
        return f"In {dtype} nothing is ranked: {rounds} round(s) give no interval, {MIN_ROUNDS} are needed."
    decode = _leaders(ranked, decode_speeds)
    prefill = _leaders(ranked, prefill_speeds)
    best = decode[0]
    assert best.decode is not None
    assert best.usd_out is not None
    slower = [row for row in ranked if row not in decode]
    speed = f"{best.decode.median:.1f} decode tokens/s, ${best.usd_out:.3g} per million output tokens"
    if len(decode) == 1:
        text = f"In {dtype} ship {best.entry['route']} for decode: {speed}, {_against(best, slower, decode_speeds)}"
    else:
        text = f"In {dtype} {_names(decode)} tie for decode at about {speed}"
        if slower:
            text += f", {_against(best, slower, decode_speeds)}"
    if len(prefill) > 1:
        text += f"; for prefill {_names(prefill)} tie"
    elif prefill[0] is best and len(decode) == 1:
        text += "; it also leads prefill"
    else:
        behind = [row for row in ranked if row not in prefill]
        text += f"; prefill goes to {prefill[0].entry['route']}, {_against(prefill[0], behind, prefill_speeds)}"
    return text + "."


def _busy(result: Result) -> list[str]:
    """Says that others used the machine in timed rounds: whatever was won or lost then may be theirs."""
    shares = [share for timed in result["rounds"] if (share := timed["busy_share"]) > IDLE_BUSY_SHARE]
    if not shares:
        return []
    return [
        f"Measured on a busy machine ({len(shares)} of {len(result['rounds'])} rounds with up to {max(shares):.0%} of "
        "the CPU in use by others), run it again on an idle one:"
    ]


def _stopped(result: Result) -> list[str]:
    """Says that the run was stopped: what is ranked rests on fewer rounds than were asked for."""
    if (stopped := result.get("stopped")) is None:
        return []
    return [f"Stopped after {result['workload']['rounds']} of {stopped['planned_rounds']} rounds."]


def decide(result: Result) -> str:
    """Returns the paragraph: a recommendation per dtype, then what failed and what did not run, with reasons."""
    rows = summarise(result)
    sentences = [*_stopped(result), *_busy(result)]
    for dtype in dict.fromkeys(entry["dtype"] for entry in result["entries"]):
        sentences.append(
            _one_dtype(dtype, [row for row in rows if row.entry["dtype"] == dtype], result["workload"]["rounds"])
        )
    for entry in result["entries"]:
        name = f"{entry['route']} {entry['dtype']}"
        if entry["status"] == "fail":
            sentences.append(f"{name} is not ranked, its numerics fail: {entry['reason']}.")
        elif entry["status"] == "failed":
            sentences.append(f"{name} is not ranked, it broke: {entry['reason']}.")
        elif entry["status"] == "not run":
            sentences.append(f"{name} was not run: {entry['reason']}.")
    return " ".join(sentences)
