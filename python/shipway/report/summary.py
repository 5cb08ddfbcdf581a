"""Figures of each route from the raw samples of a result, by the field's definitions.

TTFT is the time of the first token; TPOT = (time of last token - time of first) / (new tokens - 1); decode tokens/s is
1/TPOT at batch 1; prefill tokens/s is prompt tokens / TTFT. Each is taken per round, then the median over rounds with
its 95% interval; ratios and % of limit are taken within a round first, because the machine's limit drifts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shipway.measure.prices import usd_per_million
from shipway.measure.probes import GEMM_KIND, READ
from shipway.measure.result import Entry, Result, Sample
from shipway.measure.stats import Estimate, estimate, ratio_per_round


def ttft(sample: Sample) -> float:
    """Seconds to the first token."""
    return sample["times"][0]


def tpot(sample: Sample) -> float:
    """Seconds per token after the first."""
    times = sample["times"]
    return (times[-1] - times[0]) / (len(times) - 1)


@dataclass(frozen=True)
class Row:
    """One route in one dtype; figures it did not give are ``None``. ``ratio_*`` is its speed over the baseline's."""

    entry: Entry
    decode: Estimate | None
    prefill: Estimate | None
    ttft_s: Estimate | None
    tpot_s: Estimate | None
    usd_out: float | None
    usd_in: float | None
    decode_share: Estimate | None
    prefill_share: Estimate | None
    ratio_decode: Estimate | None
    ratio_prefill: Estimate | None

    @property
    def ranked(self) -> bool:
        """Whether the route held its verdict and was timed to the end."""
        return self.decode is not None


def per_round(entry: Entry, figure: Callable[[Sample], float]) -> dict[int, float]:
    """Returns ``figure`` of the timed run of every round; nothing for a route that failed, however far it came."""
    if entry["status"] != "ok":
        return {}
    return {sample["round"]: figure(sample) for sample in entry["samples"]}


def decode_speeds(entry: Entry) -> dict[int, float]:
    """Decode tokens/s per round."""
    return per_round(entry, lambda sample: 1 / tpot(sample))


def prefill_speeds(entry: Entry) -> dict[int, float]:
    """Prefill tokens/s per round."""
    return per_round(entry, lambda sample: sample["prompt_tokens"] / ttft(sample))


def ceilings(result: Result, kind: str) -> dict[int, float]:
    """Returns the best pattern of the probe per round, in units of ``kind``."""
    best: dict[int, float] = {}
    for sample in result["probes"]:
        if sample["kind"] == kind:
            best[sample["round"]] = max(best.get(sample["round"], 0.0), sample["value"])
    return best


def _estimate(values: dict[int, float]) -> Estimate | None:
    return estimate(list(values.values())) if values else None


def summarise(result: Result) -> list[Row]:
    """Returns one row per entry of ``result``, in its order."""
    baseline = {
        entry["dtype"]: entry for entry in result["entries"] if entry["route"] == result["workload"]["baseline"]
    }
    usd = result["price"]["usd_per_hour"]
    rows = []
    for entry in result["entries"]:
        decode, prefill = decode_speeds(entry), prefill_speeds(entry)
        read = {number: entry["decode_bytes"] * speed for number, speed in decode.items()}
        flops = {number: entry["prefill_flops"] / time for number, time in per_round(entry, ttft).items()}
        base = baseline.get(entry["dtype"])
        median_decode, median_prefill = _estimate(decode), _estimate(prefill)
        rows.append(
            Row(
                entry=entry,
                decode=median_decode,
                prefill=median_prefill,
                ttft_s=_estimate(per_round(entry, ttft)),
                tpot_s=_estimate(per_round(entry, tpot)),
                usd_out=usd_per_million(usd, median_decode.median) if median_decode else None,
                usd_in=usd_per_million(usd, median_prefill.median) if median_prefill else None,
                decode_share=ratio_per_round(read, ceilings(result, READ)),
                prefill_share=ratio_per_round(flops, ceilings(result, GEMM_KIND.get(entry["dtype"], ""))),
                ratio_decode=ratio_per_round(decode, decode_speeds(base)) if base else None,
                ratio_prefill=ratio_per_round(prefill, prefill_speeds(base)) if base else None,
            )
        )
    return rows
