"""Connection to the Jobs API of a cluster: a tunnel through Ray's launcher, or an existing URL."""

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

from rayfl.clusters.check import is_cluster
from rayfl.config import ConfigError

TUNNEL_SECONDS = 180.0
"""Time limit for a tunnel: the cloud is asked for the head's address, and ssh retries for a minute or two."""
LOOK_SECONDS = 0.5
LAST_LINES = 5
"""Lines of the tunnel's output in an error."""
RAY = (sys.executable, "-m", "ray.scripts.scripts")
"""The `ray` command of this environment."""
WITH_US = '("$@" < /dev/null; kill -9 0) & cat > /dev/null; kill -9 0'
"""Shell line that runs a command and kills its process group, including ssh, when the owner of the shell's stdin
dies."""


def is_url(cluster: str) -> bool:
    return cluster.startswith(("http://", "https://"))


def require_cluster(cluster: str) -> None:
    """Raise ConfigError if `cluster` is neither a cluster's file nor a URL."""
    if not is_url(cluster) and not is_cluster(Path(cluster)):
        raise ConfigError(
            f"--cluster: {cluster!r} is not valid. Allowed: a file of Ray's cluster launcher, as clusters/aws.yaml, or "
            "http://127.0.0.1:8265, where a tunnel to a cluster begins"
        )


@contextmanager
def opened(cluster: str) -> Iterator[str]:
    """Yield the URL of the Jobs API. A tunnel is checked and ends with the block. Raise ConfigError with the tunnel's
    output if it cannot be opened."""
    require_cluster(cluster)
    if is_url(cluster):
        yield cluster.rstrip("/")
        return
    port = _free_port()
    with tempfile.TemporaryFile() as said:
        # in its own session: after Ctrl-C this process still needs the tunnel
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
                f"--cluster {cluster}: no tunnel: `ray dashboard {cluster}` "
                f"{'ended' if ended else f'did not answer in {TUNNEL_SECONDS:g} seconds'}, "
                + ("\n  ".join(["its last lines:", *lines[-LAST_LINES:]]) if lines else "without output")
                + f"\nHint: if the cluster is not running, start it by `ray up {cluster}`"
            )
        time.sleep(LOOK_SECONDS)


def _answers(port: int) -> bool:
    """Return whether HTTP is answered: ssh accepts connections before the other end exists."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"GET /api/version HTTP/1.0\r\n\r\n")
            return bool(connection.recv(1))
    except OSError:
        return False
