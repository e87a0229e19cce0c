"""Compressed collectives, written once over any `Transport`.

After ZipCCL, sections 3 and 5.1. Of a tensor there travel the static parts of its chunks, whose
size every rank knows beforehand, the used bytes of the dynamic parts, and per chunk a descriptor:
which call this is, and the chunk's result record, which has the size. Each chunk has one sender and
one receiver. Chunks are sent out of the buffer that the encoder wrote and received into a buffer
that the decoder reads: header and offsets follow from the plan, so the receiver lays out its buffer
in advance.
"""

from __future__ import annotations

import copy
import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from .. import arrays
from ..arrays import ArrayInfo
from ..buffer import Buffer
from ..codec import Codec, decode
from ..formats.dtypes import BY_NAME, DType
from . import tensors
from .calls import Call, LateCards, TraceRecord
from .cells import CellSums
from .cost import Choice
from .digests import content_digest
from .group import CHUNKS, DESIGNS, TOPOLOGIES, Design, Exchange, Topology
from .lanes import Lanes
from .multihop import GATHERED
from .shares import CARD_NBYTES, CARD_WORDS, Shares, pieces, split
from .switch import AS_BEFORE, SUMS, Before, Measured
from .tensors import as_input, as_output, as_result

__all__ = ["DESIGNS", "TOPOLOGIES", "Communicator", "Design", "Topology"]

#: Elements of a piece of a pipelined message are a multiple of this, so that tiles are whole.
_PIECE = 1 << 16
#: Bytes of a rank's input that the paths are timed with, and how often.
_MEASURED_GPU = (1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28)
_MEASURED_HOST = (1 << 13, 1 << 17, 1 << 21)
#: At most so many bytes of all ranks in one place.
_MOST_GPU, _MOST_HOST = 1 << 30, 1 << 24
_TIMED = 4
_PIECES = 4
_PATHS = (
    Choice("native", 1, 0.0, 0.0, "measured"),
    Choice("compressed", 1, 0.0, 0.0, "measured"),
    Choice("pipelined", _PIECES, 0.0, 0.0, "measured"),
)

#: Nothing travels, so nothing is encoded.
ALONE = Choice("native", 1, 0.0, 0.0, "one rank")

_INT64 = BY_NAME["int64"]
Span = tuple[int, int]
Op = Literal["sum", "mean"]
OPS: tuple[Op, ...] = get_args(Op)


class Communicator(CellSums):
    """Compressed collectives of a group of ranks.

    All ranks make the same calls in the same order, with equal dtypes and matching shapes, from one
    thread at a time. Tensors are arrays that the transport can move: NumPy and PyTorch, on a GPU
    also CuPy and JAX, which are passed by DLPack; results are of the same library. Tensors of a
    dtype that the codec does not compress are sent raw. ``out`` may overlap the input. Work memory,
    up to about twice the largest tensor, is kept. A context manager, which ends with ``close()``.

    **Exactness.** With a lossless codec data arrive bit for bit. Sums are made in float32 (float64
    for float64), and are bit-identical on all ranks; for 8-bit floats if all ranks use one library,
    as NumPy and PyTorch round these differently. With a lossy codec all ranks that get a result get
    the same one, a rank's own part too. What is encoded once is off by at most the error bound of
    the codec's page; a sum by the bounds of its terms, the rounding of the sum and, in an
    all-reduce, the bound of the sum, which is encoded again. Statistics of a tensor (nvfp4's
    largest magnitude) travel with each chunk, and ranks need not agree on them. Native calls, which
    ``algorithm="auto"`` may take, lose only what sums round; a group of one rank loses nothing.

    **Sums.** ``"two-shot"`` is a reduce-scatter and an all-gather; each rank keeps its own scales
    and norms. ``"ring"`` and ``"butterfly"`` sum over several hops (DynamiQ, section 3.4): every
    rank encodes the sum so far, so rounding errors of ``world_size`` encodings add up, and a rank
    exchanges data with one other at a time. Statistics that add up (dynamiq's energies) are summed
    over ranks first. For mx with ``scale_rule="agreed"`` scales are the largest of all ranks, times
    a factor that follows ``scaling``, one for all tensors of the communicator. Random rounding
    differs between ranks only in the rank of the key, as correlated rounding needs it. ``"cells"``
    is in-network reduction for thc and omnireduce: payload elements are added without decoding, by
    NCCL itself or a share by each rank, after ranks agreed on the maximum of their norms; its error
    is smaller than in two-shot.

    **Damage.** Everything that is encoded has a checksum, and damage raises ``CollectiveError`` on
    the rank that receives it: on the host and with ``verify=True`` at once, on a GPU at the end of
    a later call or by ``check()``. Native calls and in-network reduction have no checksums. With
    ``verify="digest"`` ranks compare digests of what each sent and received after every such call,
    and all of them raise if any differ (for a message its receiver); on a GPU as above. The
    communicator then refuses later calls. Sums are then made by ranks, in the order of ranks, and
    not by the network.

    **Mismatch.** On the host every call is compared among ranks before data move, so that other
    calls, dtypes and shapes raise; on a GPU native calls are compared before the first of each
    collective, dtype and shape.

    Source: ZipCCL, sections 3 and 5; DynamiQ, sections 2.1, 3.4 and 4; TACO, section 4.4.2
    (pipelining).

    Args:
        transport: The transport, for this communicator alone.
        codec: A codec or its name, with all parameters given: collectives flatten tensors.
        algorithm: ``"compressed"``; ``"pipelined"``, in pieces, so that encoding, transfer and
            decoding overlap; ``"native"``, uncompressed; or ``"auto"``, the fastest of these: the
            first call of a collective and dtype measures them on this group, and later ones follow
            the cost model (ZipCCL, section 5.2).
        pieces: Number of pieces of ``"pipelined"``. None: as many as have ``granularity`` bytes.
        granularity: Bytes of a piece of a rank's tensor.
        sizes: ZipCCL's two designs. ``"first"`` sends the sizes of compressed parts before anything
            else; ``"between"`` sends them after the static parts, which then do not wait for slow
            ranks. Codecs without a dynamic part (all lossy ones) need neither.
        checksum: Whether encoded data have checksums.
        verify: False, True or ``"digest"``: see above.
        trace: Number of calls that ``trace()`` remembers.
        seed: Seed of codecs that round at random, from 0 to 2^64 - 1; used with the number of the
            call and the rank.
        topology: ``"two-shot"``, ``"ring"``, ``"butterfly"`` or ``"cells"``, for sums that do not
            name one.
        scaling: For mx with ``scale_rule="agreed"``: how the scales of sums over hops follow the
            sums. None is ``AutoScale()``.

    Raises:
        CollectiveError: On each rank, if ranks differ in format, codec or parameters, and by calls
            that fail after anything was sent; ``out`` is then undefined.
        TypeError: If an argument has a wrong type; here and by calls before anything is sent.
        ValueError: If a value is not allowed, the codec takes a parameter from the shape of
            tensors, or it does not decode to what was encoded (``round_trips``).

    Example:
        >>> import numpy as np
        >>> import tightwire as tw
        >>> from tightwire.adapters.memory import run_ranks
        >>> def task(transport):
        ...     with tw.Communicator(transport) as comm:
        ...         return comm.all_reduce(np.full(4, comm.rank + 1, np.float32))
        >>> run_ranks(2, task)[0]
        array([3., 3., 3., 3.], dtype=float32)
    """

    def _accepted(self, codec: Codec) -> Codec:
        if not codec.round_trips:
            raise ValueError(
                f"codec is {codec.spec!r}, which decodes to another tensor than was encoded; "
                "allowed: codecs whose round_trips is True"
            )
        return super()._accepted(codec)

    def all_gather(self, x: Any, out: Any = None) -> Any:
        """Gather the tensors of all ranks along the first dimension.

        Args:
            x: This rank's tensor, of the same shape and dtype on all ranks.
            out: Where to write the result: shape ``(world_size * x.shape[0], ...)``.

        Returns:
            ``out``, or a new array of that shape with the tensors of rank 0, 1, ...; of scalars
            shape ``(world_size,)``. With a lossy codec this rank's own part is decoded too, so that
            all ranks get the same bits.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If ``x`` or ``out`` is not an array that the transport moves.
            ValueError: If ``out`` does not fit.
        """
        before = self._switch.as_before("all_gather", x)
        if before is not None:
            found = self._again("all_gather", before, x, out, self._transport.all_gather)
            if found is not None:
                return found
        x, info, target = as_input(x)
        shape = (self._size * info.shape[0], *info.shape[1:]) if info.shape else (self._size,)
        into = as_output(out, info, shape, target)
        choice = self._choose("all_gather", x, info, before)
        with self._call("all_gather", "all-gather", info, choice) as call:
            call.nbytes = _nbytes(info)
            result = self._result(x, into, shape, info.dtype, choice)
            if choice.algorithm == "native":
                self._gather_native(call, x, result, info)
            else:
                self._gather(call, x.reshape(-1), result.reshape(-1), info, choice)
            into = _placed(into, result)
        return as_result(into, info.dtype, target) if out is None else out

    def all_to_all(
        self,
        x: Any,
        out: Any = None,
        *,
        send_splits: Sequence[int] | None = None,
        receive_splits: Sequence[int] | None = None,
    ) -> Any:
        """Send share j of a tensor to rank j, and receive share i of the result from rank i.

        Shares are rows, along the first dimension.

        Args:
            x: This rank's tensor, of the same row shape and dtype on all ranks.
            out: Where to write the result.
            send_splits: Rows for each rank. None: equal shares.
            receive_splits: Rows from each rank; given if and only if ``send_splits`` is.

        Returns:
            ``out``, or a new array with the rows from rank 0, 1, ... With a lossy codec the rank's
            own share is decoded too.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If ``x`` or ``out`` is not an array that the transport moves.
            ValueError: If rows cannot be divided equally, splits do not add up, or ``out`` does not
                fit.
        """
        before = self._switch.as_before("all_to_all", x) if send_splits is None else None
        if before is not None:
            found = self._again("all_to_all", before, x, out, self._transport.all_to_all)
            if found is not None:
                return found
        x, info, target = as_input(x)
        rows, row = _rows(info)
        if send_splits is None and receive_splits is None:
            outward = inward = self._equal_splits(rows)
        elif send_splits is None or receive_splits is None:
            raise ValueError("one of send_splits and receive_splits is given; needed: both or none")
        else:
            outward = self._splits("send_splits", send_splits)
            inward = self._splits("receive_splits", receive_splits)
            if sum(outward) != rows:
                raise ValueError(f"send_splits add up to {sum(outward)}; x has {rows} rows")
        equal = send_splits is None
        shape = (sum(inward), *row)
        into = as_output(out, info, shape, target)
        if equal:
            choice = self._choose("all_to_all", x, info, before)
        else:
            choice = ALONE if self._size == 1 else self._switch.choose_splits(x, info)
        share = max(outward) * math.prod(row)
        with self._call("all_to_all", "all-to-all", info, choice, share=share) as call:
            call.nbytes = _nbytes(info) if equal else 0
            whole = self._result(x, into, shape, info.dtype, choice)
            width = math.prod(row)
            flat, result = x.reshape(-1), whole.reshape(-1)
            if equal:
                there = here = [call.digest(info, info.shape)] * self._size
            else:
                there = [call.digest(info, (n, *row)) for n in outward]
                here = [call.digest(info, (n, *row)) for n in inward]
            if choice.algorithm == "native":
                if equal:
                    self._compare_new(call, x, there, here)
                else:
                    # Splits change from call to call, and not on all ranks at once.
                    self._compare(call, x, there, here)
                sends, receives = [n * width for n in outward], [n * width for n in inward]
                self._swap_native(call, flat, result, sends, receives, equal)
            elif equal:
                self._swap_equal(call, flat, result, info, choice, there)
            else:
                # The chunks of a buffer are equal, so every share is a buffer of its own.
                outs = [self._plan(info.dtype, n * width) for n in outward]
                ins = [self._plan(info.dtype, n * width) for n in inward]
                parts = split(flat, outs) if len(outs) > 1 else [flat]
                send = self._encode(call, parts, outs)
                receive = self._receive("receive", ins, x)
                if self._fixed or not self._sizes_first:
                    self._compare(call, x, there, here)
                began = self._begin_swap(call, send, receive, there, here)
                buffers = self._end_swap(call, began)
                call.exchanged = True
                for i, (buffer, part) in enumerate(zip(buffers, split(result, ins), strict=True)):
                    self._decode(call, buffer, part, i, i)
            into = _placed(into, whole)
        return as_result(into, info.dtype, target) if out is None else out

    def reduce_scatter(
        self,
        x: Any,
        out: Any = None,
        *,
        wire: str | None = None,
        decoded: Any = None,
        topology: Topology | None = None,
    ) -> Any:
        """Sum the tensors of all ranks, and keep this rank's share.

        Shares are equal, along the first dimension. In two-shot form this is an all-to-all, after
        which floats are added in float32 (float64 for float64) in the order of ranks and rounded
        once; integers wrap around. Over hops (``"ring"``, ``"butterfly"``) terms are added in the
        order of the hops, what a rank passes on is rounded to what travels, and a rank's own term
        and the last sum are not encoded. Partial sums that overflow what travels are infinite and
        stay so; ``all_reduce`` with ``op="mean"`` avoids that. Native calls round nothing, and the
        network sums float32, float64, int32 and int64 (in an all-reduce by a lossy codec on a GPU
        also bfloat16 and float16) in its own order.

        Args:
            x: This rank's tensor, of equal shape and dtype on all ranks.
            out: Where to write the result; it may have the dtype of the sum, so that bfloat16 is
                sent and float32 returned.
            wire: ``"bfloat16"`` or ``"float16"``: dtype that ``x`` is rounded to before it is
                encoded.
            decoded: An array like ``x``, which does not overlap it, to be filled with what the
                other ranks decode of ``x``: the difference is what a lossy codec (or ``wire``) has
                lost. Two-shot only.
            topology: How the sum is made; None: as the communicator was told. Dtypes that the codec
                does not compress always take two-shot.

        Returns:
            ``out``, or a new array with the shape ``(x.shape[0] / world_size, ...)``.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If an array has a wrong type or dtype.
            ValueError: If rows cannot be divided equally, an array does not fit, or ``topology``,
                ``wire`` or ``decoded`` is not allowed with the codec.
        """
        if topology is not None:
            self._check_topology(topology)
        before = self._switch.as_before("reduce_scatter", x, wire)
        if before is not None and decoded is None:
            found = self._again("reduce_scatter", before, x, out, self._transport.reduce_scatter)
            if found is not None:
                return found
        x, info, target = as_input(x)
        wide = tensors.sum_dtype(info.dtype)
        rows, row = _rows(info)
        shape = (self._equal_splits(rows)[0], *row)
        is_wide = out is not None and arrays.describe(out).dtype == wide
        into = as_output(out, info._replace(dtype=wide) if is_wide else info, shape, target)
        sent = self._wire_dtype(wire, info.dtype)
        kept = as_output(decoded, info, info.shape, target, "decoded")
        by = self._topology_for(topology, sent, math.prod(shape))
        if kept is not None and by != "two-shot":
            raise ValueError(f"decoded is given, topology is {by!r}; allowed: 'two-shot'")
        choice = self._choose("reduce_scatter", x, info._replace(dtype=sent), before, info.dtype)
        name = "all-to-all and sum" if by == "two-shot" else by
        share = math.prod(shape)
        with self._call("reduce_scatter", name, info, choice, sent, share=share) as call:
            part = info._replace(dtype=sent)
            call.nbytes = _nbytes(part)
            here = into if is_wide else None
            if here is not None and by != "two-shot" and tensors.overlap(x, here):
                # By hops this rank's own term is read where the sum is written.
                here = None
            total = self._result(x, here, shape, wide, choice)
            kept = None if kept is None else kept.reshape(-1)
            flat = total.reshape(-1)
            if choice.algorithm == "native" or by == "two-shot":
                self._scatter_sums(call, x, flat, info, sent, choice, decoded=kept)
            elif by == "cells":
                self._reduce_scatter_by_cells(call, tensors.cast(x, sent).reshape(-1), flat, part)
            else:
                self._compare_shape(call, x, part, TOPOLOGIES.index(by))
                terms = tensors.cast(x, sent).reshape(-1)
                spans = self._spans(flat.shape[0], choice.pieces)
                self._reduce_scatter_by_hops(call, terms, flat, part, by, spans)
            result = total if is_wide else tensors.cast(total, info.dtype)
            into = _placed(into, result)
        return as_result(into, info.dtype, target) if out is None else out

    def all_reduce(
        self,
        x: Any,
        out: Any = None,
        *,
        wire: str | None = None,
        op: Op = "sum",
        topology: Topology | None = None,
    ) -> Any:
        """Sum the tensors of all ranks, of any shape; all ranks get the same bits.

        Two-shot is a reduce-scatter, whose sums are rounded to what travels, and an all-gather of
        them: every term is encoded once, and so is the sum. The last ``x.size % world_size``
        elements are sent uncompressed, with a checksum. Over hops each rank encodes its share of
        the sum and all ranks decode that; shares are equally long, padded with zeros. Natively the
        network sums as in ``reduce_scatter``.

        A sum that overflows what travels is infinite, and with lossy codecs more than that element
        suffers (most make its block NaN, dynamiq its super-group); over hops a partial sum that
        overflows is enough.

        Args:
            x: This rank's tensor, of equal shape and dtype on all ranks.
            out: Where to write the result.
            wire: As in ``reduce_scatter``.
            op: ``"sum"``, or ``"mean"`` for floats. Over hops, in-network, and where a lossy codec
                gets float32 or float64, terms are divided by the number of ranks before they are
                rounded to what travels, so that no sum overflows whose mean fits; otherwise the sum
                is divided before it is rounded.
            topology: As in ``reduce_scatter``.

        Returns:
            ``out``, or a new array like ``x``.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If an array has a wrong type, or its dtype has no mean.
            ValueError: If ``out`` does not fit, or ``op``, ``topology`` or ``wire`` is not allowed.
        """
        if op not in OPS:
            raise ValueError(f"op is {op!r}; allowed: {OPS}")
        if topology is not None:
            self._check_topology(topology)
        before = self._switch.as_before("all_reduce", x, wire)
        if before is not None and op == "sum":
            found = self._again("all_reduce", before, x, out, self._reduce_plain)
            if found is not None:
                return found
        x, info, target = as_input(x)
        wide = tensors.sum_dtype(info.dtype)
        if op == "mean" and not wide.is_float:
            raise TypeError(f"x is {info.dtype.name}; allowed for a mean: floats")
        into = as_output(out, info, info.shape, target)
        sent = self._wire_dtype(wire, info.dtype)
        part = info._replace(dtype=sent)
        by = self._topology_for(topology, sent, math.prod(info.shape))
        choice = self._choose("all_reduce", x, part, before, info.dtype)
        each, rest = divmod(math.prod(info.shape), self._size)
        # By hops the last share is filled up; cells have none.
        share = each if by == "two-shot" else each + (rest > 0)
        share = math.prod(info.shape) if by == "cells" else share
        with self._call("all_reduce", by, info, choice, sent, share=share, op=op) as call:
            call.nbytes = _nbytes(part)
            if choice.algorithm != "native" and by != "two-shot":
                whole = self._result(x, into, info.shape, info.dtype, choice)
                terms, result = self._divided(x.reshape(-1), op), whole.reshape(-1)
                if by == "cells":
                    self._all_reduce_by_cells(call, terms, result, part)
                else:
                    self._reduce_by_hops(call, terms, result, part, by, choice)
                into = _placed(into, whole)
                return as_result(into, info.dtype, target) if out is None else out
            # In place is fine: what is gathered is gathered after all of `x` was read.
            whole = tensors.empty(info.shape, info.dtype, x) if into is None else into
            flat, result = x.reshape(-1), whole.reshape(-1)
            if choice.algorithm == "native" and self._sum_native(call, flat, result, info):
                if op == "mean":
                    tensors.put(result, self._divided(result, op))
                return as_result(whole, info.dtype, target) if out is None else out
            late = op
            if choice.algorithm != "native" and sent == wide and not self._codec.lossless:
                # The terms of such sums are as wide as the sums, which might overflow.
                flat, late = self._divided(flat, op), "sum"
            # What equal shares leave over, less than an element for each rank, is a raw buffer.
            main = self._size * each
            total = tensors.empty((each,), wide, x)
            left = tensors.empty((rest,), wide, x)
            encoded = self._scatter_sums(
                call, flat[:main], total, info, sent, choice, last=False, encode=late == "sum"
            )
            if rest:
                self._sum_rest(call, tensors.cast(flat[main:], sent), left, part)
            total, left = self._divided(total, late), self._divided(left, late)
            # What has been encoded already says `total` no longer.
            rounded = total if encoded is not None else tensors.cast(total, sent)
            gathered = result[:main]
            if sent != info.dtype:
                gathered = tensors.empty((main,), sent, x)
            if choice.algorithm == "native":
                self._gather_native(call, rounded, gathered, part)
            else:
                # In memory of its own: headers stay as they are from call to call.
                self._gather(
                    call, rounded, gathered, part, choice, memory="gathered", encoded=encoded
                )
            if sent != info.dtype:
                tensors.put(result[:main], gathered)
            tensors.put(result[main:], tensors.cast(left, sent))
        return as_result(whole, info.dtype, target) if out is None else out

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Overwrite ``x`` on all ranks with that of one rank.

        The root encodes once and scatters the chunks, and an all-gather spreads them. With a lossy
        codec its own ``x`` is overwritten with what the others decode.

        Args:
            x: A writable array, of equal shape and dtype on all ranks.
            root: The rank whose ``x`` is sent.

        Returns:
            ``x``.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If ``x`` is not an array that the transport moves.
            ValueError: If ``x`` is read-only, or there is no such rank.
        """
        root = self._peer("root", root)
        values, info, target = as_input(x)
        into = as_output(x, info, info.shape, target, "x").reshape(-1)
        choice = self._choose("broadcast", values, info)
        share = -(-math.prod(info.shape) // self._size)
        name = "scatter and all-gather"
        with self._call("broadcast", name, info, choice, share=share) as call:
            if choice.algorithm == "native":
                self._broadcast_native(call, into, root)
            else:
                self._broadcast(call, values.reshape(-1), into, info, root)
        return x

    def send(self, x: Any, to: int) -> None:
        """Send a tensor to another rank, which calls ``recv``.

        With a lossy codec ``x`` stays as it is on this rank.

        Args:
            x: The tensor.
            to: Number of the other rank.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If ``x`` is not an array that the transport moves.
            ValueError: If there is no such rank, or it is this one.
        """
        to = self._peer("to", to, other=True)
        x, info, _ = as_input(x)
        choice = self._switch.choose_message(info)
        key = f"from {self._rank} to {to}"
        with self._call("send", "message", info, choice, pair=key) as call:
            # No encoding of a collective has these numbers.
            call.encodings = -1 - to
            if choice.algorithm == "native":
                self._send_native(call, x, to, call.digest(info, info.shape))
                return
            plan = self._plan(info.dtype, math.prod(info.shape))
            shares = self._encode(call, [x.reshape(-1)], [plan])
            digests = [call.digest(info, info.shape)]
            cards = shares.write_cards(digests, 0)
            sizes = [0]
            with call.stage("sizes"):
                self._transport.send(shares.card_bytes, to)
                if not self._fixed:
                    arrived = self._cards(call, shares.arriving(cards), digests, self._rank)
                    sizes = self._sizes(call, arrived, shares, self._rank)
            self._message(call, shares, sizes[0], to, self._transport.send)

    def recv(self, out: Any, source: int) -> Any:
        """Receive the tensor that another rank sends to this rank.

        Args:
            out: A writable array of the shape and dtype of the sender's tensor.
            source: Number of the other rank.

        Returns:
            ``out``.

        Raises:
            CollectiveError: If anything goes wrong, such as another shape or dtype.
            TypeError: If ``out`` is not an array that the transport moves.
            ValueError: If ``out`` is read-only, there is no such rank, or it is this one.
        """
        source = self._peer("source", source, other=True)
        _, info, target = as_input(out)
        into = as_output(out, info, info.shape, target)
        choice = self._switch.choose_message(info)
        key = f"from {source} to {self._rank}"
        with self._call("recv", "message", info, choice, pair=key) as call:
            if choice.algorithm == "native":
                self._receive_native(call, into, source, call.digest(info, info.shape))
                return out
            plan = self._plan(info.dtype, math.prod(info.shape))
            shares = self._receive("receive", [plan], into)
            sizes, digests = [0], [call.digest(info, info.shape)]
            with call.stage("sizes"):
                self._transport.recv(shares.card_bytes, source)
                if not self._fixed:
                    arrived = self._cards(call, shares.arriving(shares.cards), digests, source)
                    sizes = self._sizes(call, arrived, shares, source)
            if self._fixed:
                self._compare_late(call, shares, digests, source)
            self._message(call, shares, sizes[0], source, self._transport.recv)
            buffers = shares.buffers(self._words_of(shares.memory))
            call.exchanged = True
            self._decode(call, buffers[0], into.reshape(-1), source)
        return out

    # Paths.

    def _choose(
        self,
        collective: str,
        x: Any,
        info: ArrayInfo,
        before: Before | None = None,
        source: DType | None = None,
    ) -> Choice:
        """The path of a call whose arguments are right; `info` is what travels of `source`."""
        if before is not None:
            before.left -= 1
            return AS_BEFORE
        if self._broken is not None:
            # Not worth a measurement: `_call` is about to raise.
            return AS_BEFORE
        if self._size == 1:
            return ALONE
        return self._switch.choose(collective, x, info, source)

    def _result(
        self, x: Any, into: Any, shape: tuple[int, ...], dtype: DType, choice: Choice
    ) -> Any:
        """Where the result of `x` is made: in `into`, unless that is being read meanwhile."""
        once = choice.algorithm == "compressed"
        if into is None or (not once and tensors.overlap(x, into)):
            return tensors.empty(shape, dtype, x)
        return into

    # Pieces.

    def _spans(self, n: int, pieces: int) -> list[Span]:
        """Elements 0 to n in at most `pieces` pieces of whole tiles."""
        step = max(_PIECE, -(-n // (pieces * _PIECE)) * _PIECE)
        return [(a, min(a + step, n)) for a in range(0, n, step)] or [(0, 0)]

    def _swap_equal(
        self,
        call: Call,
        flat: Any,
        result: Any,
        info: ArrayInfo,
        choice: Choice,
        digests: Sequence[int],
    ) -> None:
        """An all-to-all of equal shares, elements of shape (ranks * n,)."""
        n = flat.shape[0] // self._size
        spans = self._spans(n, choice.pieces)
        if len(spans) == 1:
            plan = self._plan(info.dtype, flat.shape[0], self._size)
            send = self._encode(call, [flat], [plan])
            receive = self._receive("receive", [plan], flat)
            began = self._begin_swap(call, send, receive, digests, digests)
            (buffer,) = self._end_swap(call, began)
            call.exchanged = True
            self._decode(call, buffer, result, None)
            return

        def put(buffers: list[Buffer], span: Span) -> None:
            self._decode_rows(call, buffers[0], result, span)

        self._swap_pieces(call, flat, info, spans, put, whole=True)

    def _swap_pieces(
        self,
        call: Call,
        flat: Any,
        info: ArrayInfo,
        spans: Sequence[Span],
        put: Callable[[list[Buffer], Span], None],
        *,
        whole: bool,
        last: bool = True,
        decoded: Any = None,
    ) -> None:
        """An all-to-all of pieces `spans` of every share of `flat`; `put` takes what was received.

        That is one buffer if it is to come `whole`, else one from every rank. `decoded` is that of
        `_scatter_sums`.
        """
        rows = flat.reshape(self._size, -1)

        def encode(k: int) -> Shares:
            a, b = spans[k]
            # A copy of the piece costs less than an encoding for each of its rows.
            piece = rows[:, a:b].reshape(-1)
            plan = self._plan(info.dtype, piece.shape[0], self._size)
            send = self._encode(call, [piece], [plan], f"send {k}")
            if decoded is not None:
                self._decode_sent(call, send, decoded.reshape(self._size, -1)[:, a:b])
            return send

        def begin(k: int, send: Shares) -> Exchange:
            a, b = spans[k]
            plans = send.plans if whole else [self._plan(info.dtype, b - a)] * self._size
            receive = self._receive(f"receive {k}", plans, flat)
            digests = [call.digest(info, info.shape, k)] * self._size
            return self._begin_swap(call, send, receive, digests, digests)

        def end(k: int, began: Exchange) -> Callable[[], None]:
            buffers = self._end_swap(call, began)
            return lambda: put(buffers, spans[k])

        self._pipeline(call, flat, len(spans), encode, begin, end, last)

    def _pipeline(
        self,
        call: Call,
        like: Any,
        count: int,
        encode: Callable[[int], Shares],
        begin: Callable[[int, Shares], Exchange],
        end: Callable[[int, Exchange], Callable[[], None]],
        last: bool,
    ) -> None:
        """Pieces 0 to `count`, each encoded, begun, ended and decoded, overlapping.

        Chunk descriptors and static parts of a piece go ahead of the dynamic parts of the one
        before, so that its sizes are known when these have gone.
        """
        call.algorithm += f", {count} pieces"
        with Lanes(like) as lanes:
            ready = lanes.encode(lambda: encode(0))
            before: Exchange | None = None
            for k in range(count):
                with call.stage("wait"):
                    send = ready()
                began = begin(k, send)
                if k + 1 < count:
                    ready = lanes.encode(functools.partial(encode, k + 1))
                if began.arriving is None:
                    lanes.decode(end(k, began))
                    continue
                if before is not None:
                    lanes.decode(end(k - 1, before))
                before = began
            if before is not None:
                lanes.decode(end(count - 1, before))
            # What goes wrong from now on, on the lanes too, is this rank's own.
            call.exchanged = last

    def _gather(
        self,
        call: Call,
        x: Any,
        out: Any,
        info: ArrayInfo,
        choice: Choice,
        last: bool = True,
        memory: str = "receive",
        encoded: Shares | None = None,
    ) -> None:
        """An all-gather of `x`, shape (n,), to `out`, shape (ranks * n,); `encoded` is `x` then."""
        n = x.shape[0]
        spans = self._spans(n, choice.pieces)
        if len(spans) == 1:
            send = encoded or self._encode(call, [x], [self._plan(info.dtype, n)])
            began = self._begin_gather(call, send, call.digest(info, info.shape), memory)
            buffer = self._end_gather(call, began)
            call.exchanged = last
            self._decode(call, buffer, out, None)
            return

        def encode(k: int) -> Shares:
            a, b = spans[k]
            return self._encode(call, [x[a:b]], [self._plan(info.dtype, b - a)], f"send {k}")

        def begin(k: int, send: Shares) -> Exchange:
            return self._begin_gather(call, send, call.digest(info, info.shape, k), f"{memory} {k}")

        def end(k: int, began: Exchange) -> Callable[[], None]:
            buffer = self._end_gather(call, began)
            return lambda: self._decode_rows(call, buffer, out, spans[k])

        self._pipeline(call, x, len(spans), encode, begin, end, last)

    def _decode_rows(
        self, call: Call, buffer: Buffer, out: Any, span: Span, note: str = CHUNKS
    ) -> None:
        """Chunk r of `buffer` to the elements `span` of row r of `out`, shape (ranks * n,)."""
        a, b = span
        rows = out.reshape(self._size, -1)
        with call.stage("decode", note):
            if tensors.is_cuda(out):
                # Host time counts here: two launches instead of two for each rank.
                tensors.put(rows[:, a:b], decode(buffer).view(self._size, b - a))
            else:
                for r, row in enumerate(rows):
                    decode(buffer, out=row[a:b], start=r * (b - a), stop=(r + 1) * (b - a))
        self._decoded(call, buffer, note)

    # Sums.

    def _wire_dtype(self, wire: str | None, dtype: DType) -> DType:
        """The dtype that elements of `dtype` travel as; of one rank alone they do not."""
        if wire is None:
            return dtype
        sent = arrays.as_dtype(wire)
        if not (sent.is_float and dtype.is_float and sent.itemsize <= dtype.itemsize):
            allowed = "floats no wider than x"
            raise ValueError(f"wire is {wire!r}, x {dtype.name}; allowed: {allowed}")
        return dtype if self._size == 1 else sent

    def _topology_for(self, topology: Topology | None, sent: DType, nelem: int) -> Topology:
        """The topology of a sum of parts of `nelem` elements that travels as `sent`."""
        chosen = self._topology if topology is None else topology
        if chosen == "cells" and self._plan(sent, nelem).codec != self._codec.spec:
            # What is too small to be coded does not add up.
            return "two-shot"
        return chosen if sent.is_float and sent.name in self._codec.dtypes else "two-shot"

    def _divided(self, x: Any, op: Op) -> Any:
        """For a mean `x` over the number of ranks, in the dtype of sums; else `x` itself."""
        if op == "sum":
            return x
        wide = tensors.cast(x, tensors.sum_dtype(tensors.dtype_of(x)))
        return tensors.elementwise(lambda v: v / self._size, wide)

    def _reduce_by_hops(
        self,
        call: Call,
        flat: Any,
        result: Any,
        info: ArrayInfo,
        topology: Topology,
        choice: Choice,
    ) -> None:
        """The sum of all ranks' `flat`, shape (n,), to `result`; `info` is what travels."""
        self._compare_shape(call, flat, info, TOPOLOGIES.index(topology))
        n, sent = flat.shape[0], info.dtype
        each = -(-n // self._size)
        terms, gathered = tensors.cast(flat, sent), result
        if n < each * self._size:
            terms = tensors.empty((each * self._size,), sent, flat)
            tensors.put(terms[:n], flat)
            tensors.fill(terms[n:], 0)
        if terms.shape[0] != n or arrays.describe(result).dtype != sent:
            gathered = tensors.empty(terms.shape, sent, flat)
        spans = self._spans(each, choice.pieces)

        def put(buffer: Buffer, k: int) -> None:
            if len(spans) == 1:
                self._decode(call, buffer, gathered, None, note=GATHERED)
            else:
                self._decode_rows(call, buffer, gathered, spans[k], GATHERED)

        stats = self._all_reduce_by_hops(call, terms, info, topology, spans, put)
        self._count_overflows(gathered.reshape(self._size, -1)[self._rank], spans, stats)
        if gathered is not result:
            tensors.put(result, gathered[:n])

    def _scatter_sums(
        self,
        call: Call,
        x: Any,
        total: Any,
        info: ArrayInfo,
        sent: DType,
        choice: Choice,
        last: bool = True,
        decoded: Any = None,
        encode: bool = False,
    ) -> Shares | None:
        """This rank's share of the sum of all ranks' `x`, whose elements travel as `sent`.

        `decoded`, shape (ranks * n,), is filled with what arrives of this rank's. With `encode` the
        sum, as `sent`, may be returned encoded, if that is one pass; `total` is then incomplete.
        """
        n = total.shape[0]
        if choice.algorithm == "native":
            if decoded is not None:
                arrived = x if self._sums_to(total, info.dtype) else tensors.cast(x, sent)
                tensors.put(decoded, arrived.reshape(-1))
            self._compare_shape(call, x, info)
            if self._scatter_native(call, x, total, info):
                return None
            # A network without such sums: nothing has been written yet.
            flat = tensors.contiguous(tensors.cast(x, sent)).reshape(-1)
            if decoded is not None:
                tensors.put(decoded, flat)
            nbytes = flat.shape[0] * sent.itemsize
            came = tensors.view(self._bytes("plain", nbytes, x)[:nbytes], sent)
            equal = [n] * self._size
            self._swap_native(call, flat, came, equal, equal, True)
            with call.stage("sum"):
                first, *others = came.reshape(self._size, n)
                tensors.put(total, first)
                for values in others:
                    tensors.add(total, values)
            return None
        flat = tensors.cast(x, sent).reshape(-1)
        info = info._replace(dtype=sent)
        spans = self._spans(n, choice.pieces)
        if len(spans) == 1:
            whole = self._plan(sent, flat.shape[0], self._size)
            # decode_add adds a whole buffer, so that there is one for each rank. On a GPU one is
            # received, as static parts that lie side by side take one call.
            plans = [self._plan(sent, n)] * self._size
            if whole.dynamic_stride and self._adds_here(whole, total):
                plans = [whole]
            digests = [call.digest(info, info.shape)] * self._size
            send = self._encode(call, [flat], [whole])
            if decoded is not None:
                self._decode_sent(call, send, decoded)
            receive = self._receive("receive", plans, flat)
            began = self._begin_swap(call, send, receive, digests, digests)
            buffers = self._end_swap(call, began)
            call.exchanged = last
            # Where sums keep them, in one pass the last rank's statistics would be the sum's.
            keeps = self._codec.lossless or self._codec.spec.sums_keep_stats
            if encode and n and self._codec._fuses(total, sent) and not keeps:
                return self._add_and_encode(call, buffers, total)
            self._add(call, buffers, total)
            return None

        def put(buffers: list[Buffer], span: Span) -> None:
            self._add(call, buffers, total[span[0] : span[1]])

        self._swap_pieces(call, flat, info, spans, put, whole=False, last=last, decoded=decoded)
        return None

    def _add_and_encode(self, call: Call, buffers: Sequence[Buffer], total: Any) -> Shares:
        """The sum of the buffers of all ranks, encoded; `total` holds all terms except the last."""
        *before, last = buffers
        local = total
        if len(before) == 1 and tensors.is_cuda(total):
            # A single term is narrow: less to write, and to read again.
            local = tensors.empty((last.plan.nelem,), last.plan.dtype, total)
            self._decode(call, before[0], local, 0)
        else:
            self._add(call, before, total)
        note = f" (from rank {self._size - 1})"
        with call.stage("decode", note), np.errstate(all="ignore"):
            shares = self._shares("send", [self._plan(last.plan.dtype, last.plan.nelem)], total)
            self._take("send", shares)
            memory, key = shares.data[0], self._key(call)
            if not self._sum_here(last, local, memory, key, None):
                self._codec.decode_add_encode(
                    last, local, out=memory, key=key, checksum=self._checksum
                )
        self._decoded(call, last, note, self._size - 1)
        return shares

    def _decode_sent(self, call: Call, send: Shares, out: Any) -> None:
        """Decode this rank's own encoding to `out`, of the shape of the plan or (ranks, n)."""
        with call.stage("decode", " (its own)"):
            buffer = Buffer.wrap(send.plans[0], send.data[0])
            tensors.put(out, decode(buffer).reshape(out.shape))

    def _add(self, call: Call, buffers: Sequence[Buffer], total: Any) -> None:
        """Sum the buffers of all ranks, or the chunks of one, to `total`."""
        tensors.clear(total)
        if buffers and buffers[0].plan.chunks > 1:
            (buffer,), n = buffers, total.shape[0]
            note = CHUNKS
            with call.stage("decode", note):
                for r in range(self._size):
                    self._decode_here(buffer, total, r * n, (r + 1) * n, add=True)
            self._decoded(call, buffer, note)
            return
        for source, buffer in enumerate(buffers):
            note = f" (from rank {source})"
            with call.stage("decode", note):
                if self._adds_here(buffer.plan, total):
                    self._decode_here(buffer, total, 0, buffer.plan.nelem, add=True)
                elif buffer.plan.dtype.is_float:
                    # Sums may be infinite or NaN; NumPy would warn.
                    with np.errstate(all="ignore"):
                        self._codec.decode_add(buffer, total)
                else:
                    tensors.add(total, decode(buffer))
            self._decoded(call, buffer, note, source)

    def _sum_rest(self, call: Call, x: Any, total: Any, info: ArrayInfo) -> None:
        """Sum all ranks' few elements `x` to `total`; they travel as they are, with checksums."""
        n, size = x.shape[0], self._size
        plan, whole = (self._plan(info.dtype, k * n, k, raw=True) for k in (1, size))
        with call.stage("rest"):
            send = self._shares("rest", [plan], x)
            if not self._encode_here(x, plan, send.data[0], None):
                self._raw.encode(x, out=send.data[0], checksum=self._checksum)
            digest = call.digest(info, info.shape, -1)
            send.write_cards([digest], 0)
            receive = self._receive("rests", [whole], x)
            self._transport.all_to_all_v(receive.parcels, send.parcels * size)
        self._compare_late(call, receive, [digest] * size)
        (buffer,) = receive.buffers(self._words_of(receive.memory))
        call.raw_bytes += (size - 1) * send.raw_nbytes
        call.wire_bytes += (size - 1) * (CARD_NBYTES + send.static_nbytes)
        came = tensors.empty((size * n,), info.dtype, x)
        self._decode(call, buffer, came, None)
        tensors.clear(total)
        for values in came.reshape(size, n):
            tensors.add(total, values)

    # Messages and broadcast.

    def _broadcast(self, call: Call, values: Any, into: Any, info: ArrayInfo, root: int) -> None:
        plan = self._plan(info.dtype, values.shape[0], self._size)
        digests = [call.digest(info, (root, *info.shape))] * self._size
        whole = self._receive("receive", [plan], values)
        self._compare_new(call, values, digests, digests)
        is_root = self._rank == root
        parts: list[list[Any]] = [[]] * self._size
        if is_root:
            send = self._encode(call, [values], [plan])
            whole.cards[...] = send.write_cards(digests, 0)
            parts = [[whole.card_bytes]] * self._size
        sizes = [0] * self._size
        if not self._fixed:
            with call.stage("sizes"):
                self._scatter(call, root, parts, [whole.card_bytes])
                cards = self._cards(call, whole.arriving(whole.cards), digests, root)
                sizes = self._sizes(call, cards, whole, root)
        cards_too = [whole.card_bytes] if self._fixed else []
        if is_root:
            own = send.shares[root]
            dynamic = pieces(send, sizes)
            parts = [[*cards_too, s.static, *d] for s, d in zip(send.shares, dynamic, strict=True)]
            call.raw_bytes += send.raw_nbytes - own.raw_nbytes
        else:
            # Not in its place in `whole`: an all-gather must not overlap itself.
            nbytes = plan.static_stride + sizes[self._rank]
            memory = self._bytes("share", nbytes, values)[:nbytes]
            own = whole.shares[self._rank]._replace(
                static=memory[: plan.static_stride], slot=memory[plan.static_stride :]
            )
        with call.stage("scatter"):
            into_pieces = [*cards_too, own.static, own.slot[: sizes[self._rank]]]
            self._scatter(call, root, parts, into_pieces)
        if self._fixed:
            self._compare_late(call, whole, digests, root)
        with call.stage("static"):
            self._transport.all_gather(whole.statics, own.static)
        if self._fixed:
            buffer = whole.buffers(self._words_of(whole.memory))[0]
        else:
            buffer = self._gather_dynamic(call, own, whole, sizes)
        others = self._size - 1
        call.raw_bytes += others * own.raw_nbytes
        call.wire_bytes += others * (int(own.static.shape[0]) + sizes[self._rank])
        call.exchanged = True
        # All ranks are to have the same bits, those of a lossy codec too.
        if not is_root or not self._codec.lossless:
            self._decode(call, buffer, into, root)

    def _scatter(
        self, call: Call, root: int, parts: Sequence[Sequence[Any]], into: Sequence[Any]
    ) -> None:
        """The arrays `parts[j]` of rank `root` fill the arrays `into` of every other rank j."""
        outs: list[Sequence[Any]] = [[] for _ in range(self._size)]
        xs = list(outs)
        if self._rank == root:
            xs = [part if peer != root else [] for peer, part in enumerate(parts)]
            call.wire_bytes += sum(piece.shape[0] for part in xs for piece in part)
        else:
            outs[root] = into
        self._transport.all_to_all_v(outs, xs)

    def _message(
        self,
        call: Call,
        shares: Shares,
        size: int,
        peer: int,
        move: Callable[[Any, int], None],
    ) -> None:
        """Send or receive the payload of one buffer: static and dynamic part are neighbours."""
        (plan,), (data,) = shares.plans, shares.data
        payload = data[plan.static_offset : plan.dynamic_offset + size]
        with call.stage("payload"):
            if payload.shape[0]:
                move(payload, peer)
        call.raw_bytes += shares.shares[0].raw_nbytes
        call.wire_bytes += CARD_NBYTES + int(payload.shape[0])

    # The native paths.

    def _again(
        self,
        collective: str,
        before: Before,
        x: Any,
        out: Any,
        move: Callable[[Any, Any], None],
    ) -> Any:
        """A native call like one before, with as little host work as can be; None if it is not."""
        # On the host and with digests a native call is more than what moves data.
        if self._broken is not None or self._digests:
            return None
        if not tensors.is_cuda(x) or not x.is_contiguous():
            return None
        plain = x.dtype in self._plain_dtypes
        # Backends differ in what they make of a scalar.
        if x.numel() < 2 or x.requires_grad or x.is_conj() or x.is_neg():
            return None
        shape = before.shape
        if shape is None:
            shape = before.shape = self._native_shape(collective, x)
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
        sequence = self._counts["group"]
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
            self._broken = str(error)
            call = Call(self._rank, collective, sequence, collective)
            raise call.failure("native", str(error)) from error
        arrays.mark_written(out)
        before.left -= 1
        self._counts["group"] = sequence + 1
        seconds = {"native": time.perf_counter() - start}
        sent, reason = before.nbytes, AS_BEFORE.reason
        self._trace.append((collective, sequence, "native", reason, sent, sent, seconds, None))
        if self._unchecked:
            self._settle_known()
        return out

    def _native_shape(self, collective: str, x: Any) -> tuple[int, ...]:
        """Of the result of a tensor that all ranks have alike."""
        if collective == "all_gather":
            return (self._size * x.shape[0], *x.shape[1:]) if x.dim() else (self._size,)
        if collective == "reduce_scatter":
            return (x.shape[0] // self._size, *x.shape[1:])
        return tuple(x.shape)

    def _reduce_plain(self, out: Any, x: Any) -> None:
        if out is not x:
            tensors.put(out, x)
        self._transport.all_reduce(out)

    def _gather_native(self, call: Call, x: Any, out: Any, info: ArrayInfo) -> None:
        self._compare_shape(call, x, info)
        x = tensors.contiguous(x)
        mine = tensors.as_bytes(x)
        with call.stage("native"):
            self._transport.all_gather(tensors.as_bytes(out), mine)
        self._sent_plain(call, (self._size - 1) * int(mine.shape[0]))
        self._check_gathered(call, x, out)

    def _swap_native(
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
        self._sent_plain(call, (sum(sends) - sends[self._rank]) * item)
        self._check_swapped(call, flat, sends, result, receives)

    def _scatter_native(self, call: Call, x: Any, total: Any, info: ArrayInfo) -> bool:
        """The network's own reduce-scatter; False if it has none for this dtype."""
        if not self._sums_to(total, info.dtype):
            return False
        flat = tensors.contiguous(x).reshape(-1)
        with call.stage("native"):
            try:
                self._transport.reduce_scatter(total, flat)
            except NotImplementedError:
                return False
        self._sent_plain(call, (self._size - 1) * total.shape[0] * info.dtype.itemsize)
        return True

    def _sum_native(self, call: Call, flat: Any, result: Any, info: ArrayInfo) -> bool:
        """The network's own all-reduce; False if it has none for this dtype."""
        if not self._reduces(info.dtype, result):
            return False
        self._compare_shape(call, flat, info)
        with call.stage("native"):
            if tensors.overlap(flat, result):
                flat = tensors.copied(flat)
            tensors.put(result, flat)
            self._transport.all_reduce(result)
        share = flat.shape[0] * info.dtype.itemsize // self._size
        self._sent_plain(call, 2 * (self._size - 1) * share)
        return True

    def _sums(self, dtype: DType) -> bool:
        """True if the network sums the dtype as we do, apart from the order.

        With digests nothing is: what travels as it is can be compared, partial sums cannot.
        """
        return not self._digests and dtype.name in ("float32", "float64", "int32", "int64")

    def _reduces(self, dtype: DType, x: Any) -> bool:
        """True if `_sum_native` sums `x`.

        In narrow floats GPUs round after every term: no worse than a lossy codec.
        """
        if dtype.name in ("bfloat16", "float16"):
            takes = tensors.is_cuda(x) and x.dtype in self._plain_dtypes
            return takes and not self._codec.lossless and not self._digests
        return self._sums(dtype)

    def _sums_to(self, total: Any, dtype: DType) -> bool:
        return self._sums(dtype) and tensors.dtype_of(total) == dtype

    def _broadcast_native(self, call: Call, into: Any, root: int) -> None:
        """Scatter and all-gather, as they are; what equal shares leave over goes to everybody."""
        data = tensors.as_bytes(into)
        self._compare_shape(call, into, arrays.describe(into), root)
        # The root's own is overwritten too.
        before = content_digest(into) if self._digests else None
        each = int(data.shape[0]) // self._size
        main = self._size * each
        mine = tensors.empty_bytes(each, into)
        tail = data[main:]
        with call.stage("native"):
            if self._rank == root:
                parts = [[data[r * each : (r + 1) * each], tail] for r in range(self._size)]
                mine[:] = parts[root][0]
                self._scatter(call, root, parts, [])
            else:
                self._scatter(call, root, [[]] * self._size, [mine, tail])
            self._transport.all_gather(data[:main], mine)
        call.raw_bytes = call.wire_bytes = call.wire_bytes + (self._size - 1) * each
        if before is not None:
            self._check_broadcast(call, before, into, root)
        call.exchanged = True

    def _send_native(self, call: Call, x: Any, to: int, name: int) -> None:
        """A descriptor of the call, then the bytes of `x`."""
        x = tensors.contiguous(x)
        word = content_digest(x) if self._digests else None
        descriptor = self._descriptor(call, name, x, word)
        with call.stage("sizes"):
            self._transport.send(tensors.as_bytes(descriptor), to)
        self._move_native(call, tensors.as_bytes(x), to, self._transport.send)

    def _receive_native(self, call: Call, into: Any, source: int, name: int) -> None:
        """What `_send_native` sends; on the host nothing of another shape or dtype is received."""
        descriptor = tensors.empty((1, CARD_WORDS), _INT64, into)
        with call.stage("sizes"):
            self._transport.recv(tensors.as_bytes(descriptor), source)
            spare = self._spare_descriptors
            arriving = tensors.OnTheWay(descriptor, spare.pop() if spare else None)
            self._check_descriptors_late(call, LateCards(arriving, [name], source, spare))
        self._move_native(call, tensors.as_bytes(into), source, self._transport.recv)
        if self._digests:
            strange = tensors.cast(content_digest(into) != descriptor[0, 1:2], _INT64).reshape(1, 1)
            self._check_digests_late(call, strange, lambda found: [self._rank] * int(found[0, 0]))

    def _move_native(
        self, call: Call, payload: Any, peer: int, move: Callable[[Any, int], None]
    ) -> None:
        with call.stage("native"):
            if payload.shape[0]:
                move(payload, peer)
        self._sent_plain(call, int(payload.shape[0]))
        call.wire_bytes += CARD_NBYTES

    def _sent_plain(self, call: Call, nbytes: int) -> None:
        call.raw_bytes += nbytes
        call.wire_bytes += nbytes

    # Measuring.

    def _measure(
        self, collective: str, like: Any, info: ArrayInfo, source: DType | None
    ) -> Measured:
        """Time the paths of a collective on this group; every rank gets the same numbers."""
        call = Call(self._rank, collective, self._counts["group"], "")
        call.text = f"{info.dtype.name} {info.shape} {collective}"
        kept, self._trace = self._trace, deque(maxlen=1)
        scaling, self._scaling = self._scaling, copy.copy(self._scaling)
        try:
            with call.stage("measure"):
                # Ranks with other tensors would take other paths.
                digests = [call.digest(info, info.shape)] * self._size
                self._compare(call, like, digests, digests, "measure")
                return self._timed(call, like, info, source or info.dtype)
        except BaseException as error:
            self._broken = self._broken or str(error)
            raise
        finally:
            self._trace, self._scaling = kept, scaling
            # What the largest sizes took is worth more than the time to get it again.
            for memory in (self._memories, self._layouts, self._holders):
                memory.clear()

    def _timed(self, call: Call, like: Any, info: ArrayInfo, source: DType) -> Measured:
        collective = call.collective
        cuda = tensors.is_cuda(like)
        sizes: tuple[int, ...] = _MEASURED_GPU if cuda else _MEASURED_HOST
        most = _MOST_GPU if cuda else _MOST_HOST
        gathered = self._size if collective == "all_gather" else 1
        sizes = tuple(n for n in sizes if n * gathered <= most) or sizes[:2]
        rows = []
        for nbytes in sizes:
            n = nbytes // info.dtype.itemsize // self._size * self._size
            bits = tensors.random_normal(n, source, like)
            wire = {} if source == info.dtype else {"wire": info.dtype.name}
            row = []
            for choice in _PATHS:
                with self._switch.forced(choice):
                    row.append(self._time(collective, bits, wire))
                if choice.algorithm == "compressed":
                    record = TraceRecord(*self._trace[-1])
            rows.append(row)
        ratio = record.wire_bytes / record.raw_bytes if record.raw_bytes else 1.0
        found = self._transport.empty(8 * (3 * len(rows) + 1))
        table = np.array([*np.ravel(rows), ratio])
        found[:] = tensors.on_device(table.view(np.uint8), tensors.device_of(found))
        values = tensors.view(found, BY_NAME["float64"])
        self._transport.all_reduce(values, "max")
        agreed = arrays.host_array(values)
        digests = [call.digest_of(agreed.tobytes(), info)] * self._size
        self._compare(call, like, digests, digests, "measure", "have other measurements")
        return Measured(sizes, agreed[:-1].reshape(-1, 3).tolist(), _PIECES, float(agreed[-1]))

    def _time(self, collective: str, x: Any, wire: dict[str, str]) -> float:
        """Seconds of one call, the median of some: what a call takes, not what it can take."""
        run = functools.partial(getattr(self, collective), **wire)
        out = None
        samples = []
        for _ in range(_TIMED + 1):
            tensors.synchronize(x)
            self._transport.barrier()
            start = time.perf_counter()
            out = run(x, out) if collective != "broadcast" else run(x)
            tensors.synchronize(x)
            samples.append(time.perf_counter() - start)
        # The first one compiles and allocates.
        return statistics.median(samples[1:])


def _placed(into: Any, result: Any) -> Any:
    """`result` in the memory that was asked for, if any was."""
    if into is None or into is result:
        return result
    tensors.put(into, result)
    return into


def _native_nbytes(collective: str, nbytes: int, size: int) -> int:
    """Bytes that a rank with an input of `nbytes` sends to others."""
    others = size - 1
    if collective == "all_gather":
        return nbytes * others
    return nbytes * others // size * (2 if collective == "all_reduce" else 1)


def _nbytes(info: ArrayInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize


def _rows(info: ArrayInfo) -> tuple[int, tuple[int, ...]]:
    """Number and shape of the rows of x."""
    if not info.shape:
        raise ValueError("x has shape (); allowed: at least one dimension")
    return info.shape[0], info.shape[1:]


def _byte_parts(x: Any, counts: Sequence[int]) -> list[Any]:
    """The bytes of the contiguous 1-D array `x` in parts of so many elements."""
    item = arrays.describe(x).dtype.itemsize
    data, found, at = tensors.as_bytes(x), [], 0
    for count in counts:
        found.append(data[at : at + count * item])
        at += count * item
    return found
