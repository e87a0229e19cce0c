"""How ranks that know nothing but one address find each other."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack

_PAUSE = 0.05


def meet(
    rank: int, world_size: int, address: tuple[str, int], mine: bytes, timeout: float = 30.0
) -> list[bytes]:
    """What each rank gave as `mine`, in the order of ranks; all ranks call it together.

    Rank 0 listens at `address`, (host, port), for the time of the call; the others know it. It
    trusts whoever connects: for networks of one's own. Raises OSError (TimeoutError is one) if
    ranks are not there within `timeout` seconds, and RuntimeError if two ranks have one number or
    they differ in `world_size`.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; allowed: 0 to {world_size - 1}")
    deadline = time.monotonic() + timeout
    if rank == 0:
        return _collect(world_size, address, mine, deadline)
    with _connect(address, deadline) as connection, connection.makefile("rw") as file:
        file.write(json.dumps([rank, world_size, mine.hex()]) + "\n")
        file.flush()
        line = file.readline()
    if not line:
        raise ConnectionError(f"rank 0 at {address} left before all ranks had connected")
    return [bytes.fromhex(text) for text in json.loads(line)]


def _collect(
    world_size: int, address: tuple[str, int], mine: bytes, deadline: float
) -> list[bytes]:
    found = {0: mine.hex()}
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(address))
        files = []
        while len(found) < world_size:
            server.settimeout(_left(deadline))
            try:
                connection = stack.enter_context(server.accept()[0])
            except TimeoutError:
                missing = sorted(set(range(world_size)) - set(found))
                raise TimeoutError(f"ranks {missing} have not connected to {address}") from None
            connection.settimeout(_left(deadline))
            file = stack.enter_context(connection.makefile("rw"))
            try:
                peer, size, theirs = json.loads(file.readline())
            except ValueError as error:
                raise ConnectionError(
                    f"a connection to {address} is not from a rank: {error}"
                ) from error
            if size != world_size or peer in found or not 0 < peer < world_size:
                here = f"ranks {sorted(found)} of {world_size} are here"
                raise RuntimeError(f"rank {peer} of {size} has connected; {here}")
            found[peer] = theirs
            files.append(file)
        everything = [found[i] for i in range(world_size)]
        for file in files:
            file.write(json.dumps(everything) + "\n")
            file.flush()
    return [bytes.fromhex(text) for text in everything]


def _connect(address: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(address, _left(deadline))
        except OSError as error:
            # Rank 0 may not be listening yet.
            if _left(deadline) <= _PAUSE:
                raise TimeoutError(f"rank 0 cannot be reached at {address}: {error}") from error
            time.sleep(_PAUSE)
        else:
            connection.settimeout(_left(deadline))
            return connection


def _left(deadline: float) -> float:
    """Seconds left, at least some: 0 would mean not to wait at all."""
    return max(1e-3, deadline - time.monotonic())
