"""Prints what ``bench-serve`` measured; every figure is made from the result document."""

from __future__ import annotations

from statistics import median
from typing import Any, TextIO

from shipway.measure.stats import Estimate, estimate
from shipway.report.lines import print_table


def figures(server: dict[str, Any], new_tokens: int) -> dict[str, list[float]]:
    """Per round: requests/s, output tokens/s (of ids generated), and the median request's TTFT and TPOT, seconds.

    TPOT is (latency - TTFT) / (new tokens - 1). The client's own token count is not used: it counts pieces of text.
    """
    rows: dict[str, list[float]] = {"requests_s": [], "tokens_s": [], "ttft": [], "tpot": []}
    for round_ in server["rounds"]:
        requests = round_["requests"]
        seconds = max(request["sent_s"] + request["latency_s"] for request in requests)
        rows["requests_s"].append(len(requests) / seconds)
        rows["tokens_s"].append(len(requests) * new_tokens / seconds)
        rows["ttft"].append(median(request["ttft_s"] for request in requests))
        rows["tpot"].append(median((r["latency_s"] - r["ttft_s"]) / (new_tokens - 1) for r in requests))
    return rows


def print_serving(result: dict[str, Any], out: TextIO) -> None:
    """Prints workload, verdict and table; a failed verdict has no figures."""
    work, verdict = result["workload"], result["verdict"]
    ours, stock = result["servers"]
    print(
        f"{work['model']}, f32, {work['rounds']} rounds of {work['requests']} requests, {work['concurrency']} in "
        f"flight, about {work['prompt_tokens']} prompt and {work['new_tokens']} new tokens each; client: "
        f"{work['client']}",
        file=out,
    )
    apart = f", {verdict['first_apart']} prompts apart" if verdict["first_apart"] else ""
    print(
        f"verdict: {'PASS' if verdict['ok'] else 'FAIL'}: greedy tokens of {verdict['prompts']} prompts against "
        f"{stock['server']}: {verdict['tokens']} compared{apart}, largest margin {verdict['largest_margin']:.2g} nats",
        file=out,
    )
    if not verdict["ok"]:
        return
    lines = [["server", "ready s", "requests/s", "output tok/s", "TTFT ms", "TPOT ms"]]
    measured = {server["server"]: figures(server, work["new_tokens"]) for server in (ours, stock)}
    for server in (ours, stock):
        rows = measured[server["server"]]
        lines.append(
            [
                server["server"],
                f"{server['start_s']:.0f}",
                _interval(estimate(rows["requests_s"]), 3),
                _interval(estimate(rows["tokens_s"]), 1),
                _interval(estimate(rows["ttft"]), 0, 1000),
                _interval(estimate(rows["tpot"]), 1, 1000),
            ]
        )
    print_table(lines, out)
    ratio = (
        estimate(measured[ours["server"]]["tokens_s"]).median / estimate(measured[stock["server"]]["tokens_s"]).median
    )
    print(
        f"output tok/s: {ratio:.2f} x {stock['server']}; the servers ran one after the other, so a small difference "
        "may be drift",
        file=out,
    )


def _interval(value: Estimate, digits: int, scale: float = 1.0) -> str:
    text = f"{value.median * scale:.{digits}f}"
    if value.low is None or value.high is None:
        return text
    return f"{text} [{value.low * scale:.{digits}f}, {value.high * scale:.{digits}f}]"
