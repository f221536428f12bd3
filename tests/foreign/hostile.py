"""A server that answers with bytes of any kind, at any pace, to whatever it is asked."""

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

Reply = Callable[[str], Iterable[bytes]]
"""From the path that is asked for to the bytes of the whole reply, head and all."""


def head(*lines: str, status: str = "200 OK") -> bytes:
    """Return a reply's status and headers."""
    return "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", *lines, "")).encode()


def page(body: bytes) -> list[bytes]:
    """Return a good reply."""
    return [head(f"Content-Length: {len(body)}"), body]


def slowly(data: bytes, seconds: float = 0.05) -> Iterator[bytes]:
    """Yield bytes one at a time, `seconds` before each."""
    for place in range(len(data)):
        time.sleep(seconds)
        yield data[place : place + 1]


def again(data: bytes) -> Iterator[bytes]:
    """Yield bytes without end."""
    while True:
        yield data


@contextmanager
def answering(reply: Reply) -> Iterator[str]:
    """Serve from threads of this process; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError, StopIteration):  # who asked may leave at any time
                asked = b""
                while b"\r\n\r\n" not in asked:
                    asked += connection.recv(65536) or b"\r\n\r\n"
                for data in reply(asked.split()[1].decode()):
                    connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # a body that is left unread would reset the connection
                    pass

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        accepting.join(5)  # else it may accept for the next server, whose socket can have this one's number
