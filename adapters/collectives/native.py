"""Native calls: data travel as they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ... import arrays
from ...arrays import ArrayInfo
from ...formats.dtypes import DType
from . import tensors
from .calls import Call
from .digests import content_digest
from .path_selection import NATIVE_AGAIN, SUMS, NativeCall
from .steps import Steps
from .sums import Sum, divided


class Native:
    """The native form of collectives."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._session = steps.session
        self._comparisons = steps.comparisons
        self._digest_checks = steps.digest_checks
        self._transport = steps.session.transport
        self._rank, self._size = steps.session.rank, steps.session.size

    def again(
        self,
        collective: str,
        before: NativeCall,
        x: Any,
        out: Any,
        move: Callable[[Any, Any], None],
    ) -> Any:
        """A native call like one before, with as little host work as can be; None if it is not."""
        # On the host and with digests a native call is more than what moves data.
        if self._session.broken is not None or self._session.digests:
            return None
        if not tensors.is_cuda(x) or not x.is_contiguous():
            return None
        plain = x.dtype in self._session.plain_dtypes
        # Backends differ in what they make of a scalar.
        if x.numel() < 2 or x.requires_grad or x.is_conj() or x.is_neg():
            return None
        shape = before.shape
        if shape is None:
            shape = before.shape = _result_shape(collective, x, self._size)
            before.nbytes = _native_nbytes(collective, x.nbytes, self._size)
            dtype = tensors.dtype_of(x)
            sums = self._reduces(dtype, x) if collective == "all_reduce" else self._sums(dtype)
            before.summed = plain and sums
        if collective in SUMS and not before.summed:
            return None
        if out is None:
            out = x.new_empty(shape)
        elif (out is not x or collective != "all_reduce") and (
            type(out) is not type(x)
            or out.shape != shape
            or out.dtype != x.dtype
            or out.device != x.device
            or not out.is_contiguous()
            or out.requires_grad
            or tensors.overlap(x, out)
        ):
            return None
        sequence = self._session.counts["group"]
        start = time.perf_counter()
        try:
            if plain:
                move(out, x)
            else:
                move(tensors.as_bytes(out), tensors.as_bytes(x))
        except NotImplementedError:
            # Nothing has been sent: this network has no such sum.
            return None
        except (RuntimeError, OSError) as error:
            self._session.broken = str(error)
            call = Call(self._rank, collective, sequence, collective)
            raise call.failure("native", str(error)) from error
        arrays.mark_written(out)
        before.left -= 1
        self._session.counts["group"] = sequence + 1
        seconds = {"native": time.perf_counter() - start}
        sent, reason = before.nbytes, NATIVE_AGAIN.reason
        self._session.records.append(
            (collective, sequence, "native", reason, sent, sent, seconds, None)
        )
        if self._session.unchecked:
            self._session.settle_known()
        return out

    def all_gather(self, call: Call, x: Any, out: Any, info: ArrayInfo) -> None:
        """`x` of all ranks to `out`."""
        self._comparisons.compare_shape(call, x, info)
        x = tensors.contiguous(x)
        mine = tensors.as_bytes(x)
        with call.stage("native"):
            self._transport.all_gather(tensors.as_bytes(out), mine)
        sent_plain(call, (self._size - 1) * int(mine.shape[0]))
        self._digest_checks.check_gathered(call, x, out)

    def all_to_all(
        self,
        call: Call,
        flat: Any,
        result: Any,
        sends: Sequence[int],
        receives: Sequence[int],
        equal: bool,
    ) -> None:
        """Elements `sends[j]` of `flat` go to rank j, `receives[i]` of `result` come from i."""
        flat = tensors.contiguous(flat)
        with call.stage("native"):
            if equal:
                self._transport.all_to_all(tensors.as_bytes(result), tensors.as_bytes(flat))
            else:
                outs = [[part] for part in _byte_parts(result, receives)]
                self._transport.all_to_all_v(outs, [[part] for part in _byte_parts(flat, sends)])
        item = arrays.describe(flat).dtype.itemsize
        sent_plain(call, (sum(sends) - sends[self._rank]) * item)
        self._digest_checks.check_swapped(call, flat, sends, result, receives)

    def reduce_scatter(self, call: Call, x: Any, total: Any, what: Sum) -> None:
        """This rank's share of the sum of all ranks' `x`, of ranks * n elements, to `total`, (n,).

        The network sums, or each rank does.
        """
        info, sent, decoded = what.info, what.sent, what.decoded
        if decoded is not None:
            arrived = x if self._sums_to(total, info.dtype) else tensors.cast(x, sent)
            tensors.put(decoded, arrived.reshape(-1))
        self._comparisons.compare_shape(call, x, info)
        if self._network_sums(call, x, total, info):
            return
        # A network without such sums: nothing has been written yet.
        flat = tensors.contiguous(tensors.cast(x, sent)).reshape(-1)
        if decoded is not None:
            tensors.put(decoded, flat)
        nbytes = flat.shape[0] * sent.itemsize
        received = tensors.view(self._steps.memory.scratch("plain", nbytes, x)[:nbytes], sent)
        n = total.shape[0]
        equal = [n] * self._size
        self.all_to_all(call, flat, received, equal, equal, True)
        with call.stage("sum"):
            first, *others = received.reshape(self._size, n)
            tensors.put(total, first)
            for values in others:
                tensors.add(total, values)

    def _network_sums(self, call: Call, x: Any, total: Any, info: ArrayInfo) -> bool:
        """The network's own reduce-scatter; False if it has none for this dtype."""
        if not self._sums_to(total, info.dtype):
            return False
        flat = tensors.contiguous(x).reshape(-1)
        with call.stage("native"):
            try:
                self._transport.reduce_scatter(total, flat)
            except NotImplementedError:
                return False
        sent_plain(call, (self._size - 1) * total.shape[0] * info.dtype.itemsize)
        return True

    def all_reduce(self, call: Call, flat: Any, result: Any, what: Sum) -> bool:
        """The network's own all-reduce; False if it has none for this dtype."""
        info = what.info
        if not self._reduces(info.dtype, result):
            return False
        self._comparisons.compare_shape(call, flat, info)
        with call.stage("native"):
            if tensors.overlap(flat, result):
                flat = tensors.copied(flat)
            tensors.put(result, flat)
            self._transport.all_reduce(result)
        share = flat.shape[0] * info.dtype.itemsize // self._size
        sent_plain(call, 2 * (self._size - 1) * share)
        if what.op == "mean":
            tensors.put(result, divided(result, what.op, self._size))
        return True

    def broadcast(self, call: Call, into: Any, root: int) -> None:
        """Scatter and all-gather, as they are; what equal shares leave over goes to everybody."""
        data = tensors.as_bytes(into)
        self._comparisons.compare_shape(call, into, arrays.describe(into), root)
        # The root's own is overwritten too.
        before = content_digest(into) if self._session.digests else None
        each = int(data.shape[0]) // self._size
        main = self._size * each
        mine = tensors.empty_bytes(each, into)
        tail = data[main:]
        with call.stage("native"):
            if self._rank == root:
                parts = [[data[r * each : (r + 1) * each], tail] for r in range(self._size)]
                mine[:] = parts[root][0]
                self._steps.scatter(call, root, parts, [])
            else:
                self._steps.scatter(call, root, [[]] * self._size, [mine, tail])
            self._transport.all_gather(data[:main], mine)
        call.raw_bytes = call.wire_bytes = call.wire_bytes + (self._size - 1) * each
        if before is not None:
            self._digest_checks.check_broadcast(call, before, into, root)
        call.exchanged = True

    def reduce_plain(self, out: Any, x: Any) -> None:
        """The network's own sum of `x`, to `out`."""
        if out is not x:
            tensors.put(out, x)
        self._transport.all_reduce(out)

    def _sums(self, dtype: DType) -> bool:
        """True if the network sums the dtype as we do, apart from the order.

        With digests nothing is: what travels as it is can be compared, partial sums cannot.
        """
        return not self._session.digests and dtype.name in ("float32", "float64", "int32", "int64")

    def _reduces(self, dtype: DType, x: Any) -> bool:
        """True if `all_reduce` sums `x`.

        In narrow floats GPUs round after every term: no worse than a lossy codec.
        """
        if dtype.name in ("bfloat16", "float16"):
            takes = tensors.is_cuda(x) and x.dtype in self._session.plain_dtypes
            return takes and not self._session.codec.lossless and not self._session.digests
        return self._sums(dtype)

    def _sums_to(self, total: Any, dtype: DType) -> bool:
        return self._sums(dtype) and tensors.dtype_of(total) == dtype


def _native_nbytes(collective: str, nbytes: int, size: int) -> int:
    """Bytes that a rank with an input of `nbytes` sends to others."""
    others = size - 1
    if collective == "all_gather":
        return nbytes * others
    return nbytes * others // size * (2 if collective == "all_reduce" else 1)


def _result_shape(collective: str, x: Any, size: int) -> tuple[int, ...]:
    """Of the result of a tensor that all ranks have alike."""
    if collective == "all_gather":
        return (size * x.shape[0], *x.shape[1:]) if x.dim() else (size,)
    if collective == "reduce_scatter":
        return (x.shape[0] // size, *x.shape[1:])
    return tuple(x.shape)


def _byte_parts(x: Any, counts: Sequence[int]) -> list[Any]:
    """The bytes of the contiguous 1-D array `x` in parts of so many elements."""
    item = arrays.describe(x).dtype.itemsize
    data, found, at = tensors.as_bytes(x), [], 0
    for count in counts:
        found.append(data[at : at + count * item])
        at += count * item
    return found


def sent_plain(call: Call, nbytes: int) -> None:
    """Account for `nbytes` that travelled as they are."""
    call.raw_bytes += nbytes
    call.wire_bytes += nbytes
