"""A way to the Jobs API of a cluster: one of our own through the cluster's launcher, or somebody else's."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rayfl.config import ConfigError

TUNNEL_SECONDS = 180.0
"""How long a tunnel may take: the cloud is asked where the head is, and ssh tries again for a minute or two."""
LOOK_SECONDS = 0.5
LAST_LINES = 5
"""How much of what a tunnel said an error repeats."""
RAY = (sys.executable, "-m", "ray.scripts.scripts")
"""The `ray` of this environment, which need not be the one on the PATH."""
WITH_US = '("$@" < /dev/null; kill -9 0) & cat > /dev/null; kill -9 0'
"""A shell's line for a command that ends with the process that holds the shell's stdin, however that one dies. Its
process group goes with it: the ssh that it started."""


def is_url(cluster: str) -> bool:
    return cluster.startswith(("http://", "https://"))


def require_cluster(cluster: str) -> None:
    """Refuses what is neither a file nor an address."""
    if not is_url(cluster) and not Path(cluster).is_file():
        raise ConfigError(
            f"--cluster: given {cluster!r}; allowed: a file of Ray's cluster launcher, as clusters/aws.yaml, or "
            "http://127.0.0.1:8265, where a tunnel to a cluster begins"
        )


@contextmanager
def opened(cluster: str) -> Iterator[str]:
    """The address of the Jobs API, as http://HOST:PORT. It answers if it is at the end of our own tunnel, which ends
    with this context. A ConfigError, with what the tunnel said, where none could be made."""
    require_cluster(cluster)
    if is_url(cluster):
        yield cluster.rstrip("/")
        return
    port = _free_port()
    with tempfile.TemporaryFile() as said:
        # in a session of its own: Ctrl-C is for this process, which may still have to speak to the cluster
        process = subprocess.Popen(
            ["sh", "-c", WITH_US, "sh", *RAY, "dashboard", cluster, "--port", str(port)],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process, port, cluster, said)
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _wait(process: subprocess.Popen, port: int, cluster: str, said: IO[bytes]) -> None:
    end = time.monotonic() + TUNNEL_SECONDS
    while not _answers(port):
        ended = process.poll() is not None
        if ended or time.monotonic() > end:
            said.seek(0)
            lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
            raise ConfigError(
                f"--cluster {cluster}: no tunnel to it: `ray dashboard {cluster}` "
                f"{'ended' if ended else f'brought no answer in {TUNNEL_SECONDS:g} seconds'}, with "
                + ("\n  ".join(["these last lines:", *lines[-LAST_LINES:]]) if lines else "nothing said")
                + f"\nis the cluster up? `ray up {cluster}` starts it"
            )
        time.sleep(LOOK_SECONDS)


def _answers(port: int) -> bool:
    """Whether something speaks HTTP at the other end: ssh itself takes a connection before anything is there."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"GET /api/version HTTP/1.0\r\n\r\n")
            return bool(connection.recv(1))
    except OSError:
        return False
