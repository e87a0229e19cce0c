"""Send tensors over a socket, from one process to another.

Run it with `python examples/socket_stream.py`. A buffer says in its first bytes how long it is, so
that buffers follow each other on the wire without a frame around them.
"""

import multiprocessing
import socket

import numpy as np

import tightwire as tw

COUNT = 5


def tensor(i: int) -> np.ndarray:
    """Tensor number `i`, which both sides can make, to compare."""
    return np.random.default_rng(i).normal(0, 0.02, (100 + i, 64)).astype(np.float32)


def send(port: int) -> None:
    """The other process: connect, and write one buffer after another."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    with connection, connection.makefile("wb") as stream:
        for i in range(COUNT):
            stream.write(bytes(tw.encode(tensor(i))))


def main() -> None:
    """Start the other process, and read what it sends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        port = server.getsockname()[1]
        sender = multiprocessing.get_context("spawn").Process(target=send, args=(port,))
        sender.start()
        connection, _ = server.accept()

    nbytes, received = 0, []
    with connection, connection.makefile("rb") as stream:
        # A peer that is not trusted cannot make this process take more than 1 MiB a buffer.
        for buffer in tw.read_buffers(stream, max_nbytes=1 << 20):
            nbytes += buffer.nbytes
            received.append(tw.decode(buffer))
    sender.join()

    assert len(received) == COUNT
    assert all(np.array_equal(x, tensor(i)) for i, x in enumerate(received))
    raw = sum(x.nbytes for x in received)
    print(f"{len(received)} tensors came bit for bit: {nbytes} bytes in place of {raw}")


if __name__ == "__main__":
    main()
