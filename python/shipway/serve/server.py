"""MAX's server as a child process: started with our architecture, watched until it answers, stopped cleanly."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shipway.client import new_log
from shipway.errors import CannotRunError, ShipwayError, this_python
from shipway.model.checkpoint import open_checkpoint
from shipway.model.resolve import cache_dir, resolve
from shipway.serve.hf_directory import hf_directory

_MODULAR = "26.7.0"
_ARCHITECTURE = "shipway.serve.architecture"
_MAX_LENGTH = 4096  # unless asked for more: the KV cache is allocated at the start, max_batch * max_length long
_GRACE_S = 30.0  # for running requests and the worker, before the whole process group is killed
_PR_SET_PDEATHSIG = 1


class ServerError(ShipwayError):
    """MAX's server failed to start, or died (exit code 1)."""

    exit_code = 1


@dataclass(frozen=True)
class ServeSettings:
    """What a server is started with.

    Attributes:
        model: Path or name of the checkpoint.
        host: Interface to listen on.
        port: TCP port.
        max_batch: Sequences in a batch.
        max_length: Prompt and new tokens of a sequence together; 4096 or what the model allows if ``None``.
        max_batch_input_tokens: Prompt tokens of a step; a longer prompt is read in chunks.
        stock: Serve MAX's own architecture, not ours: what ours is compared with.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 8
    max_length: int | None = None
    max_batch_input_tokens: int = 2048
    stock: bool = False


class Server:
    """A running ``max serve``; a context manager that stops it.

    Attributes:
        url: Its OpenAI endpoint.
        model: The name it serves the model under.
        directory: The Hugging Face directory it reads.
        log: The file its output goes to.
        start_s: Seconds from the start to the first answer of ``/health``.
        max_length: Prompt and new tokens of a sequence together.
    """

    def __init__(self, settings: ServeSettings, show: Callable[[str], None]) -> None:
        """Starts the server and waits until it answers.

        Args:
            settings: What to serve, and where.
            show: Is told what is going on.

        Raises:
            CannotRunError: MAX's server is not installed.
            ShipwayError: The model or a setting is not usable, or the port is taken.
            ServerError: The server ended before it answered.
        """
        _check_installed()
        show(f"opening {settings.model}")
        checkpoint = open_checkpoint(resolve(settings.model))
        checkpoint.tokenizer  # noqa: B018 (a broken one is refused here, in one line)
        most = checkpoint.config.max_position_embeddings
        self.max_length = settings.max_length or min(most, _MAX_LENGTH)
        if self.max_length > most:
            raise ShipwayError(f"--max-length {self.max_length} exceeds the {most} tokens {settings.model} is made for")
        _check_free(settings.host, settings.port)
        self.model = settings.model
        self.directory = hf_directory(checkpoint)
        self.log = new_log("serve")
        self._settings = settings
        self._process = self._start()
        self.url = f"http://{settings.host}:{settings.port}/v1"
        try:
            self.start_s = self._wait_until_ready(show)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self) -> None:
        """Returns never: raises what ends the wait.

        Raises:
            ServerError: The server died.
        """
        self._process.wait()
        raise self._died("died")

    def stop(self) -> None:
        """Lets running requests end, then ends the server and everything it started."""
        if self._process.poll() is None:
            self._process.terminate()  # it alone: it ends its workers in order
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):  # mostly nothing of it is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        s = self._settings
        command = [
            *maxs_command("serve"),
            "--model",
            str(self.directory),
            "--served-model-name",
            s.model,
            "--devices",
            "cpu",
        ]
        command += ["--host", s.host, "--port", str(s.port), "--quantization-encoding", "float32"]
        command += ["--max-batch-size", str(s.max_batch), "--max-length", str(self.max_length)]
        command += ["--max-batch-input-tokens", str(s.max_batch_input_tokens)]
        root = str(Path(__file__).resolve().parent.parent.parent)
        if not s.stock:
            command += ["--custom-architectures", f"{root}:{_ARCHITECTURE}"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "MODULAR_CACHE_DIR": str(cache_dir() / "modular"),
            "MODULAR_TELEMETRY_ENABLED": "false",
            "MODULAR_CRASH_REPORTING_ENABLED": "false",
            "MAX_SERVE_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": "1",
        }
        libc = ctypes.CDLL(None)
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us alone, and we end it in order
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # not left behind when we are killed
            )

    def _wait_until_ready(self, show: Callable[[str], None]) -> float:
        started = time.monotonic()
        told = -10.0
        while True:
            seconds = time.monotonic() - started
            if self._process.poll() is not None:
                raise self._died("ended before it answered")
            if self._healthy():
                return seconds
            if seconds - told >= 10:
                told = seconds
                show(f"starting MAX's server, {seconds:.0f} s (the first start compiles for a minute or two)")
            time.sleep(0.25)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url.removesuffix("v1") + "health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _died(self, how: str) -> ServerError:
        reason = death_reason(self.log.read_text(errors="replace"))
        return ServerError(
            f"MAX's server {how} (exit code {self._process.returncode}): {reason[:300]}; log: {self.log}"
        )


def maxs_command(name: str) -> list[str]:
    """Returns the start of a command line of ``max``, of this environment whatever ``PATH`` says."""
    return [sys.executable, "-c", "import sys; from max._entrypoints.pipelines import main; sys.exit(main())", name]


def death_reason(log: str) -> str:
    """Returns the line of a server's log that says best why it ended: what the model's process raised last."""
    before = log.partition("Worker crashed")[0]  # what follows is the server's own unwinding
    errors = re.findall(r"^(?:[\w.]*(?:Error|Exception)|error): .*", before, re.MULTILINE)
    return (errors or before.strip().splitlines() or ["no output"])[-1]


def _check_installed() -> None:
    try:
        found = version("modular")
    except PackageNotFoundError:
        found = None
    if found != _MODULAR:
        have = f"modular {found} is installed" if found else "it is not installed"
        remedy = this_python(f"-m pip install modular=={_MODULAR}")
        raise CannotRunError(f"MAX's server is needed and {have}: {remedy}")


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        raise ShipwayError(f"cannot listen on {host}:{port}: {error}") from None
