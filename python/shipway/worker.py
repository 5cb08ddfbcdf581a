"""One route in a process of its own: ``python -m shipway.worker ROUTE --channel FD --threads N``.

ROUTE is a name of the catalogue or ``module:callable``. The driver (:mod:`shipway.client`) starts this process, hands
it one end of a socket by descriptor, and speaks :mod:`shipway.channel` over it; stdout and stderr belong to whatever
the route prints. Only the standard library is imported before the CPU affinity is set: thread pools (MAX's, OpenMP's,
OpenBLAS's) take their size from the affinity mask when they are loaded.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path


def available_cpus() -> int:
    """Returns how many CPUs this process may use: its affinity mask, cut down to the container's CPU quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cpus
    return cpus if quota == "max" else max(1, min(cpus, round(int(quota) / int(period))))


def choose_cpus(threads: int) -> list[int]:
    """Returns ``threads`` CPUs of the affinity mask, one per physical core before any second hardware thread."""
    allowed = sorted(os.sched_getaffinity(0))

    def sibling_rank(cpu: int) -> int:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings = path.read_text().strip()
        except OSError:
            return 0
        first = int(siblings.replace("-", ",").split(",")[0])
        return int(cpu != first and first in allowed)

    return sorted(sorted(allowed, key=sibling_rank)[:threads])


def _exit_with_parent(sock: socket.socket) -> None:
    """Ends this process when the driver's end of the socket closes, even while the route computes or is stopped.

    A thread waits for the hang-up. A process stopped by SIGSTOP runs no thread, so the kernel is asked to send SIGCONT
    when the parent dies; SIGCONT does nothing to a running process, so a parent *thread* that ends is harmless.
    """

    def wait() -> None:
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLRDHUP)
        while not poll.poll():
            pass
        os._exit(0)

    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGCONT)
        threading.Thread(target=wait, name="exit-with-parent", daemon=True).start()


def main() -> None:
    """Sets the process up, then answers messages until ``close``."""
    parser = argparse.ArgumentParser(prog="shipway.worker")
    parser.add_argument("route")
    parser.add_argument("--channel", type=int, required=True, help="descriptor of the socket")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when a worker ends
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, choose_cpus(arguments.threads))
    sock = socket.socket(fileno=arguments.channel)
    sock.set_inheritable(False)
    _exit_with_parent(sock)

    from shipway.channel import Channel
    from shipway.service import Service

    Service(arguments.route, Channel(sock)).serve()
    sys.stdout.flush()
    os._exit(0)  # a runtime's exit handlers may hang or crash after its work is done


if __name__ == "__main__":
    main()
