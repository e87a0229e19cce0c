"""What stands for the module torchcomms: its interface to backends in Python, over torch's gloo.

Ranks are threads. What is like torchcomms, whose C++ calls a backend:

- The name of a backend is looked up when a communicator is made, and its class is called while a
  lock is held; ``init`` is called without it.
- A class derives from ``TorchCommBackend``, which offers no method. Methods get their arguments by
  position, without the hints and the timeout of the call. What they return is None or has
  ``wait()``; a method that is missing raises.
- Backends of its own, here ``"gloo"``, have no methods in Python: only a communicator has them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

#: Rank and number of ranks of this thread: those that torchcomms takes from the environment.
here = threading.local()
_lock = threading.Lock()
_classes: dict[str, Any] = {}


class RedOpType(Enum):
    """Kinds of reductions."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVG = 8


class ReduceOp:
    """A reduction."""

    SUM: ReduceOp
    MAX: ReduceOp
    AVG: ReduceOp

    def __init__(self, kind: RedOpType) -> None:
        self.type = kind


for _kind in RedOpType:
    setattr(ReduceOp, _kind.name, ReduceOp(_kind))


class CommOptions:
    """What a communicator is made with."""

    def __init__(self) -> None:
        self.abort_process_on_timeout_or_error = True
        self.timeout = timedelta(seconds=60)
        self.store: Any = None
        self.enable_reconfigure = False
        self.hints: dict[str, str] = {}


class TorchWork:
    """A call that is over, or one that ``wait`` waits for."""

    def __init__(self, work: Any = None) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def is_completed(self) -> bool:
        return self._work is None


class TorchCommBackend:
    """The base class of backends in Python."""

    def __init__(self) -> None:
        self.base_is_made = True


class Gloo:
    """A backend of torchcomms itself. `made` has the names of the calls of this rank."""

    def __init__(
        self, device: Any, name: str, options: CommOptions, place: tuple[int, int]
    ) -> None:
        store = options.store
        if store is None:
            store = dist.PrefixStore(name, here.default_store)
        # A store that is given is for one communicator.
        assert store.add(f"init_count/{place[0]}", 1) == 1, "several communicators on one store"
        self.rank, self.size = place
        self.name, self.options, self.store = name, options, store
        self.device = torch.device(device)
        self.made: list[str] = []
        self.parts = 0
        self.group = dist.ProcessGroupGloo(store, *place, timeout=options.timeout)

    def call(self, name: str, args: tuple[Any, ...]) -> TorchWork:
        self.made.append(name)
        *given, asynchronous = args
        work = getattr(self, f"_{name}")(*given)
        if not asynchronous:
            work.wait()
            return TorchWork()
        return TorchWork(work)

    def split(self, ranks: list[int], name: str, options: CommOptions) -> Gloo | None:
        self.parts += 1
        if not ranks:
            return None
        if self.rank not in ranks:
            raise RuntimeError(f"Current rank {self.rank} is not included in the ranks list")
        options.store = dist.PrefixStore(f"{self.parts}/{name}_{min(ranks)}", self.store)
        place = ranks.index(self.rank), len(ranks)
        return Gloo(self.device, f"{name}_{min(ranks)}", options, place)

    def _all_reduce(self, x: Any, op: ReduceOp) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp = _op(op)
        return _Then(self.group.allreduce([x], options), lambda: self._mean(x, op))

    def _reduce(self, x: Any, root: int, op: ReduceOp) -> Any:
        options = dist.ReduceOptions()
        options.reduceOp, options.rootRank = _op(op), root
        return self.group.reduce([x], options)

    def _reduce_scatter_single(self, out: Any, x: Any, op: ReduceOp) -> Any:
        return self._reduce_scatter(out, list(x.chunk(self.size)), op)

    def _reduce_scatter(self, out: Any, xs: list[Any], op: ReduceOp) -> Any:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _op(op)
        return _Then(self.group.reduce_scatter([out], [xs], options), lambda: self._mean(out, op))

    _reduce_scatter_v = _reduce_scatter

    def _mean(self, x: Any, op: ReduceOp) -> None:
        if op.type is RedOpType.AVG:
            x.div_(self.size)

    def _all_gather(self, outs: list[Any], x: Any) -> Any:
        return self.group.allgather([outs], [x])

    _all_gather_v = _all_gather

    def _all_gather_single(self, out: Any, x: Any) -> Any:
        return self._all_gather(list(out.chunk(self.size)), x)

    def _all_to_all_single(self, out: Any, x: Any) -> Any:
        return self.group.alltoall_base(out, x, [], [])

    def _all_to_all_v_single(self, out: Any, x: Any, outs: list[int], ins: list[int]) -> Any:
        # Rows behind the last split belong to nobody.
        return self.group.alltoall_base(out[: sum(outs)], x[: sum(ins)], outs, ins)

    def _all_to_all(self, outs: list[Any], xs: list[Any]) -> Any:
        whole, given = torch.cat(outs), torch.cat(xs)
        sizes = [[len(x) for x in part] for part in (outs, xs)]
        work = self.group.alltoall_base(whole, given, *sizes)

        def place() -> None:
            for out, part in zip(outs, whole.split(sizes[0]), strict=True):
                out.copy_(part)

        return _Then(work, place)

    def _broadcast(self, x: Any, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self.group.broadcast([x], options)

    def _scatter(self, out: Any, xs: list[Any], root: int) -> Any:
        options = dist.ScatterOptions()
        options.rootRank = root
        return self.group.scatter([out], [xs] if xs else [], options)

    def _gather(self, outs: list[Any], x: Any, root: int) -> Any:
        options = dist.GatherOptions()
        options.rootRank = root
        return self.group.gather([outs] if outs else [], [x], options)

    def _send(self, x: Any, to: int) -> Any:
        return self.group.send([x], to, 0)

    def _recv(self, x: Any, source: int) -> Any:
        return self.group.recv([x], source, 0)

    def _barrier(self) -> Any:
        return self.group.barrier()


class _Then:
    """A work, and what is to be done behind it."""

    def __init__(self, work: Any, then: Callable[[], None]) -> None:
        self._work, self._then = work, then

    def wait(self) -> None:
        self._work.wait()
        self._then()


def _op(op: ReduceOp) -> Any:
    """torch's gloo has no means."""
    return getattr(dist.ReduceOp, op.type.name.replace("AVG", "SUM"))


class TorchComm:
    """A communicator of a backend: ``new_comm`` and ``split`` make it."""

    def __init__(self, backend: str, impl: Any, device: Any, options: CommOptions) -> None:
        self._backend, self._impl, self._device, self._options = backend, impl, device, options

    def get_backend_impl(self) -> Any:
        return self._impl

    def get_backend(self) -> str:
        return self._backend

    def get_device(self) -> Any:
        return torch.device(self._device)

    def get_options(self) -> CommOptions:
        return self._options

    def get_name(self) -> str:
        return str(self._override("get_comm_name")()) if self._in_python else str(self._impl.name)

    def get_rank(self) -> int:
        return int(self._override("get_rank")() if self._in_python else self._impl.rank)

    def get_size(self) -> int:
        return int(self._override("get_size")() if self._in_python else self._impl.size)

    def finalize(self) -> None:
        if self._in_python:
            self._override("finalize")()
        else:
            self._impl.group.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        if not hasattr(self._impl, "set_timeout"):
            raise RuntimeError("[TorchCommBackend]: setTimeout not implemented for communicator")
        self._impl.set_timeout(timeout)

    def split(
        self,
        ranks: list[int],
        name: str,
        hints: dict[str, str] | None = None,
        timeout: timedelta | None = None,
    ) -> TorchComm | None:
        options = _options(hints, timeout)
        split = self._override("split") if self._in_python else self._impl.split
        part = split(list(ranks), name, options)
        if part is None:
            return None
        _check_made(part)
        return TorchComm(self._backend, part, self._device, options)

    def send(self, tensor: Any, dst: int, async_op: bool, hints: Any = None) -> TorchWork:
        return self._call("send", tensor, dst, async_op)

    def recv(self, tensor: Any, src: int, async_op: bool, hints: Any = None) -> TorchWork:
        return self._call("recv", tensor, src, async_op)

    def broadcast(self, tensor: Any, root: int, async_op: bool, hints: Any = None) -> TorchWork:
        return self._call("broadcast", tensor, root, async_op)

    def all_reduce(self, tensor: Any, op: Any, async_op: bool, hints: Any = None) -> TorchWork:
        return self._call("all_reduce", tensor, op, async_op)

    def reduce(self, tensor: Any, root: int, op: Any, async_op: bool) -> TorchWork:
        return self._call("reduce", tensor, root, op, async_op)

    def all_gather(self, tensor_list: list[Any], tensor: Any, async_op: bool) -> TorchWork:
        return self._call("all_gather", tensor_list, tensor, async_op)

    def all_gather_v(self, tensor_list: list[Any], tensor: Any, async_op: bool) -> TorchWork:
        return self._call("all_gather_v", tensor_list, tensor, async_op)

    def all_gather_single(self, output: Any, input: Any, async_op: bool) -> TorchWork:
        return self._call("all_gather_single", output, input, async_op)

    def reduce_scatter(self, output: Any, input_list: Any, op: Any, async_op: bool) -> TorchWork:
        return self._call("reduce_scatter", output, input_list, op, async_op)

    def reduce_scatter_v(self, output: Any, input_list: Any, op: Any, async_op: bool) -> TorchWork:
        return self._call("reduce_scatter_v", output, input_list, op, async_op)

    def reduce_scatter_single(self, output: Any, input: Any, op: Any, async_op: bool) -> TorchWork:
        return self._call("reduce_scatter_single", output, input, op, async_op)

    def all_to_all_single(self, output: Any, input: Any, async_op: bool) -> TorchWork:
        return self._call("all_to_all_single", output, input, async_op)

    def all_to_all_v_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        async_op: bool,
    ) -> TorchWork:
        sizes = list(output_split_sizes), list(input_split_sizes)
        return self._call("all_to_all_v_single", output, input, *sizes, async_op)

    def all_to_all(
        self, output_tensor_list: list[Any], input_tensor_list: list[Any], async_op: bool
    ) -> TorchWork:
        return self._call("all_to_all", output_tensor_list, input_tensor_list, async_op)

    def barrier(self, async_op: bool) -> TorchWork:
        return self._call("barrier", async_op)

    def scatter(
        self, output_tensor: Any, input_tensor_list: list[Any], root: int, async_op: bool
    ) -> TorchWork:
        return self._call("scatter", output_tensor, input_tensor_list, root, async_op)

    def gather(
        self, output_tensor_list: list[Any], input_tensor: Any, root: int, async_op: bool
    ) -> TorchWork:
        return self._call("gather", output_tensor_list, input_tensor, root, async_op)

    @property
    def _in_python(self) -> bool:
        return isinstance(self._impl, TorchCommBackend)

    def _override(self, name: str) -> Any:
        found = getattr(self._impl, name, None)
        if found is None:
            raise RuntimeError(f'Tried to call pure virtual function "TorchCommBackend::{name}"')
        return found

    def _call(self, name: str, *args: Any) -> TorchWork:
        if self._in_python:
            result = self._override(name)(*args)
            assert result is None or callable(result.wait)
            return TorchWork(result)
        found: TorchWork = self._impl.call(name, args)
        return found


def _options(hints: dict[str, str] | None, timeout: timedelta | None) -> CommOptions:
    found = CommOptions()
    found.hints = dict(hints or {})
    assert all(isinstance(text, str) for pair in found.hints.items() for text in pair)
    found.timeout = timeout or found.timeout
    return found


def _check_made(impl: Any) -> None:
    """pybind11 refuses an object whose base class was not initialised."""
    assert isinstance(impl, Gloo) or (isinstance(impl, TorchCommBackend) and impl.base_is_made)


def register_backend(name: str, backend_class: Any) -> None:
    """Have ``new_comm`` know a class; what is registered first stays."""
    with _lock:
        _classes.setdefault(name, backend_class)


def new_comm(
    backend: str,
    device: Any,
    name: str,
    abort_process_on_timeout_or_error: bool | None = None,
    timeout: timedelta | None = None,
    store: Any = None,
    enable_reconfigure: bool = False,
    hints: dict[str, str] | None = None,
) -> TorchComm:
    """Make a communicator, as all its ranks do together."""
    options = _options(hints, timeout)
    options.store = store
    if abort_process_on_timeout_or_error is not None:
        options.abort_process_on_timeout_or_error = abort_process_on_timeout_or_error
    if backend == "gloo":
        impl: Any = Gloo(device, name, options, here.place)
        return TorchComm(backend, impl, device, options)
    # A class that makes a communicator in its constructor waits here for ever.
    with _lock:
        if backend not in _classes:
            raise ModuleNotFoundError(f"failed to find backend {backend}")
        impl = _classes[backend]()
        _check_made(impl)
    if enable_reconfigure:
        raise RuntimeError(f"enable_reconfigure=true is not supported by backend: {backend}")
    impl.init(torch.device(device), name, options)
    return TorchComm(backend, impl, device, options)
