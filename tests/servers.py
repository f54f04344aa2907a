"""Tracking servers that are not well."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Answer = Callable[[socket.socket, threading.Event], None]
"""Handler of a connection, until the event is set."""


def trickle(connection: socket.socket, over: threading.Event) -> None:
    """An answer that never ends: a byte now and then keeps every timeout of a request from passing."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
    while not over.wait(0.1):
        connection.sendall(b"x")


def fail(connection: socket.socket, over: threading.Event) -> None:
    """500, whatever is asked."""
    connection.recv(65536)
    said = b'{"error_code": "INTERNAL_ERROR", "message": "on purpose"}'
    head = f"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nContent-Length: {len(said)}\r\n"
    connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + said)


def late(seconds: float) -> Answer:
    """500, after so long."""

    def answer(connection: socket.socket, over: threading.Event) -> None:
        if not over.wait(seconds):
            fail(connection, over)

    return answer


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The address of a server that answers so."""
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            answer(connection, over)

    def accept(server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()
            server.shutdown(socket.SHUT_RDWR)
