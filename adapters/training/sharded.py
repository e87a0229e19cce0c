"""Training of sharded models by SDP4Bit: weights as differences, gradients in two levels.

After Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for
LLM Training" (NeurIPS 2024): quantization of weight differences (qWD) and two-level gradient
quantization smoothed by a Hadamard transform (TLq-HS). specs/sdp4bit.md has the arithmetic.

Weights, on every rank (here two threads are the ranks)::

    import numpy as np
    import tightwire as tw
    from tightwire.adapters.transports.threads import run_ranks
    from tightwire.adapters.training.sharded import TwoLevel, WeightDifferences

    def weights(transport):
        gathers = WeightDifferences(tw.Communicator(transport))
        shard = np.random.default_rng(transport.rank).normal(0, 0.02, 5000).astype(np.float32)
        for _ in range(3):
            full = gathers.gather("layer", shard)
            shard = shard - np.float32(1e-3) * np.sign(shard)
        return full

    print(run_ranks(2, weights)[0].shape)

Gradients, in a grid of nodes, each with as many ranks: ``within`` has the ranks of a node,
``between`` those of equal number in their nodes::

    def gradients(within, between):
        levels = TwoLevel(within, between)
        x = np.random.default_rng(levels.rank).normal(0, 1e-3, 4 * 5000).astype(np.float32)
        return levels.reduce_scatter(x)
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import arrays
from ...arrays import ArrayInfo
from ...codec import codec
from ...codecs.common.base import Plan
from ...codecs.sdp4bit import Sdp4bit
from ...formats.dtypes import BY_NAME
from ..collectives import tensors
from ..collectives.calls import Call, TraceRecord
from ..collectives.chunk_views import DESCRIPTOR_NBYTES
from ..collectives.communicator import Communicator
from ..collectives.cost import Choice
from ..collectives.session import Options, Session
from ..collectives.steps import Steps
from ..transports.base import Transport
from .error_feedback import in_library_of

_FLOAT32 = BY_NAME["float32"]
_CHOICE = Choice("compressed", 1, 0.0, 0.0, "")

#: How a gather goes; ranks take the least that one of them can do.
_WHOLE, _DIFFERENCES, _UNCHANGED = range(3)
_HOW = ("as they are", "differences", "nothing is sent")


@dataclass
class _Replica:
    """What all ranks hold of a tensor, shape (ranks * n,), and where they have it from."""

    values: Any
    #: This rank's share when it was last sent, None if that is not known.
    shard: Any
    #: What tells replicas of equal names apart: how they began. All have got the same differences
    #: since, as one that misses any is forgotten.
    origin: int


class WeightDifferences:
    """All-gathers of sharded weights that send what has changed, in 4 bits.

    For each name every rank keeps a *replica*: what all ranks know of the whole tensor. A rank
    sends its new shard minus its share of the replica, and every rank, itself included, adds what
    that decodes to. What one gather loses is in the next difference, so errors do not add up: a
    gather is off by the codec's error of the last difference, and by the rounding of the sum, made
    in float32, to the tensor's dtype. All ranks get the same bits.

    The weights are sent in full, by ``comm``, if a rank has no replica, if ranks have different
    ones, and if a difference is infinite or NaN. If no rank's shard has changed, nothing is sent
    and the replica is the result. To know this, ranks exchange 24 bytes before every gather, and
    wait for them on the host.

    Memory: for each name the unsharded tensor and this rank's shard, in their dtype; while a gather
    runs a float32 shard and what is sent and received; for 16-bit dtypes also an unsharded float32
    tensor.

    All ranks make the same calls in the same order, from one thread at a time.

    Source: SDP4Bit (NeurIPS 2024), quantization of weight differences (qWD).

    Args:
        comm: A communicator with a lossless codec.
        bits: As in the codec sdp4bit.
        group: As in the codec sdp4bit.
        rounding: As in the codec sdp4bit.
        seed: As in ``Communicator``.

    Raises:
        CollectiveError: If ranks differ.
        ValueError: If the codec of ``comm`` is lossy, or a value is not allowed.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        bits: int = 4,
        group: int = 2048,
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        if not comm.codec.lossless:
            raise ValueError(f"comm has the codec {comm.codec.name!r}; allowed: lossless ones")
        chosen = codec("sdp4bit", bits=bits, group=group, rotate="none", rounding=rounding)
        self.comm = comm
        #: Damage is never added to a replica: verified at once.
        options = Options(verify=True, seed=seed)
        self._group = Session(comm.transport, chosen, options, round_trips=False)
        self._group.agree()
        self._steps = Steps(self._group)
        self._replicas: dict[str, _Replica] = {}
        #: Bytes that would have gone to other ranks as shards are, and that went, in all gathers.
        self.raw_bytes = self.wire_bytes = 0

    def gather(self, name: str, shard: Any, out: Any = None) -> Any:
        """Gather the shards of all ranks along the first dimension, with the codec's error.

        Args:
            name: Name of the tensor. It begins anew when shape, dtype or device change.
            shard: This rank's shard: float16, bfloat16 or float32, of a shape that is equal on all
                ranks. Other dtypes are sent in full, and no replica is kept.
            out: Where to write the result; it may overlap ``shard``.

        Returns:
            ``out``, or a new array, with a copy of the replica, and the shape of
            ``Communicator.all_gather``.

        Raises:
            CollectiveError: For damage, after which the name begins anew on all ranks; for another
                name, shape or dtype on another rank and for lost ranks, after which every call is
                refused.
            TypeError: If ``out`` has a wrong type or dtype.
            ValueError: If ``out`` does not fit.
        """
        x, info, target = tensors.as_input(shard)
        if info.dtype.name not in Sdp4bit.dtypes:
            found = self.comm.all_gather(shard, out)
            self._count(*self.comm.trace(last=1))
            return found
        ranks = self._group.size
        shape = (ranks * info.shape[0], *info.shape[1:]) if info.shape else (ranks,)
        into = tensors.as_output(out, info, shape, target)
        flat = tensors.contiguous(x).reshape(-1)
        with self._group.call("gather", "weight differences", info, _CHOICE) as call:
            try:
                values = self._gathered(call, name, flat, info)
            except BaseException:
                self._replicas.pop(name, None)
                raise
            finally:
                self._count(call)
        if into is None:
            into = tensors.empty(shape, info.dtype, x)
        tensors.put(into, values.reshape(shape))
        return tensors.as_result(into, info.dtype, target) if out is None else out

    def close(self) -> None:
        """Close ``comm`` with its transport, and free all replicas. Closing again does nothing."""
        self.reset()
        self._group.close()
        self.comm.close()

    def reset(self) -> None:
        """Forget all replicas: weights are sent in full once more."""
        self._replicas.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, equal on all ranks.

        It may be left out: weights are then sent in full once.

        Returns:
            ``"replicas"`` has copies by name, shape ``(world_size * n,)``, ``"world_size"`` the
            number of ranks.
        """
        replicas = {name: tensors.copied(r.values) for name, r in self._replicas.items()}
        return {"replicas": replicas, "world_size": self._group.size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all replicas by those of a state. They move to the devices of their shards.

        Ranks compare a digest of them at the next gather of each name.

        Args:
            state: A result of ``state_dict``.

        Raises:
            ValueError: If the state is of another number of ranks or does not say, as other ranks
                have other shards.
        """
        ranks = state.get("world_size")
        if ranks != self._group.size:
            what = "says no world_size" if ranks is None else f"is of {ranks} ranks"
            raise ValueError(f"state {what}; allowed: of {self._group.size} ranks, or none")
        self._replicas = {}
        for name, values in state["replicas"].items():
            host = arrays.host_array(tensors.as_bytes(values))
            kept = tensors.copied(values)
            self._replicas[name] = _Replica(kept, None, _number(host.tobytes()))

    def trace(self) -> list[TraceRecord]:
        """Records of the last gathers, oldest first; ``reason`` says how weights were sent."""
        return self._group.trace()

    def _count(self, *calls: Call | TraceRecord) -> None:
        for call in calls:
            self.raw_bytes += call.raw_bytes
            self.wire_bytes += call.wire_bytes

    def _gathered(self, call: Call, name: str, x: Any, info: ArrayInfo) -> Any:
        """The replica, shape (ranks * n,), after a gather of `x`, shape (n,)."""
        group = self._group
        replica, difference, how = self._replicas.get(name), None, _WHOLE
        with call.stage("difference"), np.errstate(all="ignore"):
            if replica is not None:
                replica = self._beside(replica, x)
            if replica is not None:
                mine = replica.values.reshape(group.size, -1)[group.rank]
                difference = tensors.elementwise(
                    operator.sub, tensors.cast(x, _FLOAT32), tensors.cast(mine, _FLOAT32)
                )
                if bool((difference - difference == 0).all()):
                    same = replica.shard is not None and bool((replica.shard == x).all())
                    how = _UNCHANGED if same else _DIFFERENCES
        part = _number(name.encode())
        with call.stage("agree"):
            origin = 0 if replica is None else replica.origin
            words = np.array([call.digest(info, info.shape, part), origin, how])
            found = group.gather_plain(words.view(np.uint8)).view(np.int64)
        call.wire_bytes += (group.size - 1) * words.nbytes
        strange = np.flatnonzero(found[:, 0] != words[0]).tolist()
        if strange:
            raise call.failure("agree", f"ranks {strange} gather another name, dtype or shape")
        agreed = int(found[:, 2].min()) if (found[:, 1] == origin).all() else _WHOLE
        call.reason = _HOW[agreed]
        if agreed == _WHOLE or replica is None:
            # Whatever fails now is the communicator's.
            call.exchanged = True
            replica = self._whole(call, x)
        elif agreed == _DIFFERENCES:
            self._add(call, replica, difference, info, part)
        else:
            call.raw_bytes += (group.size - 1) * x.shape[0] * info.dtype.itemsize
        if replica.shard is None:
            replica.shard = self._new(x, 1)
        tensors.put(replica.shard, x)
        self._replicas[name] = replica
        return replica.values

    def _whole(self, call: Call, x: Any) -> _Replica:
        """A replica of what is sent as it is."""
        values = self._new(x, self._group.size)
        self.comm.all_gather(x, values)
        # A replica is to be nobody's guess.
        self.comm.check()
        for record in self.comm.trace(last=1):
            call.raw_bytes += record.raw_bytes
            call.wire_bytes += record.wire_bytes
        return _Replica(values, None, call.sequence + 1)

    def _add(
        self, call: Call, replica: _Replica, difference: Any, info: ArrayInfo, part: int
    ) -> None:
        """Send the difference, and add those of all ranks to the replica."""
        group, steps = self._group, self._steps
        digest = call.digest(info, info.shape, part)
        plan = steps.memory.plan(_FLOAT32, difference.shape[0])
        send = steps.coding.encode(call, [difference], [plan])
        raw = call.raw_bytes
        buffer = steps.end_gather(call, steps.begin_gather(call, send, digest, "receive"))
        call.raw_bytes = raw + (group.size - 1) * difference.shape[0] * info.dtype.itemsize
        call.exchanged = True
        note = " (chunk i is rank i's)"
        with call.stage("decode", note), np.errstate(all="ignore"):
            total = tensors.cast(replica.values, _FLOAT32)
            group.codec.decode_add(buffer, total)
            if total is not replica.values:
                tensors.put(replica.values, total)
        steps.coding.decoded(call, buffer, note)

    def _beside(self, replica: _Replica, x: Any) -> _Replica | None:
        """The replica in the library and on the device of `x`; None if it is of other shards."""
        values, n = replica.values, self._group.size * x.shape[0]
        if tuple(values.shape) != (n,) or tensors.dtype_of(values) != tensors.dtype_of(x):
            return None
        same = tensors.is_torch(values) == tensors.is_torch(x)
        if same and tensors.device_of(values) == tensors.device_of(x):
            return replica
        copy = self._new(x, self._group.size)
        tensors.put(copy, in_library_of(values, x))
        return _Replica(copy, None, replica.origin)

    @tensors.kept
    def _new(self, x: Any, times: int) -> Any:
        return tensors.empty((times * x.shape[0],), tensors.dtype_of(x), x)


class TwoLevel:
    """Sums over a grid of ranks, in 8 bits within nodes and 4 bits between them.

    With N ranks in each of M nodes, rank l of node m is rank ``m * N + l`` of the whole, and owns
    that share of a sum, of ``N * M`` equal ones. It receives from the other ranks of its node their
    terms of the shares of rank l in all nodes, in 8 bits, and adds them up. Then it exchanges these
    sums, in 4 bits, with rank l of the other nodes. Runs of 32 values are rotated before the first
    encoding and back after the last decoding: sums within a node are of rotated values. All sums
    are made in float32, in the order of ranks. All ranks of a node together send one tensor in 4
    bits to other nodes, whatever N is.

    A share of a sum is off by the errors of ``N * M`` encodings in 8 bits and M in 4 bits; a rank's
    own terms are encoded as well. The relative squared error is that of a sum in one level of 4
    bits where ranks' tensors are independent, and up to N times that where they are alike: two
    levels save traffic between nodes. Infinities and NaN make their group of the sum NaN.

    All ranks make the same calls in the same order, from one thread at a time. Work memory, two
    bytes an element, is kept. A call also takes a float32 for each element of M shares, and for
    other dtypes than float32 one for each element of the tensor.

    Source: SDP4Bit (NeurIPS 2024), two-level gradient quantization with a Hadamard transform
    (TLq-HS).

    Args:
        within: Transport of the ranks of this node, for this object alone.
        between: Transport of the ranks with this rank's number in all nodes, in the same order of
            nodes for each number, for this object alone.
        bits: Bits within and between nodes, 8 or 4 each.
        group: As in the codec sdp4bit.
        rounding: As in the codec sdp4bit.
        seed: As in ``Communicator``.

    Raises:
        CollectiveError: On ranks that see that the transports do not form a grid.
        ValueError: If a value is not allowed.
    """

    def __init__(
        self,
        within: Transport,
        between: Transport,
        *,
        bits: tuple[int, int] = (8, 4),
        group: int = 128,
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        near, far = bits
        options: dict[str, Any] = {"group": group, "rounding": rounding}
        encodes = codec("sdp4bit", bits=near, rotate="encode", **options)
        decodes = codec("sdp4bit", bits=far, rotate="decode", **options)
        both = codec("sdp4bit", bits=near, **options)
        inner, outer = (
            Session(transport, coded, Options(seed=seed), round_trips=False)
            for transport, coded in ((within, encodes), (between, decodes))
        )
        inner.agree()
        outer.agree()
        self._within, self._between = inner, outer
        self._steps = Steps(inner), Steps(outer)
        self._check_grid(inner, outer)
        self._check_grid(outer, inner)
        # Several groups of a level are not to draw the same numbers.
        inner.seed = (seed + (2 * outer.rank + 1 << 32)) % 2**64
        outer.seed = (seed + (2 * inner.rank + 2 << 32)) % 2**64
        #: Bytes that would have gone to other ranks as `x` is, and that went, in all calls so far.
        self.raw_bytes = self.wire_bytes = 0
        # These draw alike in all nodes, so that all get the same bits.
        self._gathers = [Communicator(t, both, seed=seed) for t in (between, within)]
        self._groups: list[Session | Communicator] = [inner, outer, *self._gathers]
        self.rank = outer.rank * inner.size + inner.rank
        self.world_size = outer.size * inner.size

    def reduce_scatter(self, x: Any, out: Any = None) -> Any:
        """Sum the tensors of all ranks, and keep this rank's share along the first dimension.

        Args:
            x: This rank's tensor: float16, bfloat16 or float32, of equal shape on all ranks.
            out: Where to write the result; it may overlap ``x``, and may be float32.

        Returns:
            ``out``, or a new array; the sum is rounded once to the dtype of ``x``, or of ``out``.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If an array has a wrong type or dtype.
            ValueError: If rows cannot be divided equally, or ``out`` does not fit.
        """
        x, info, target = _checked(x)
        rows = info.shape[0] if info.shape else 0
        if not info.shape or rows % self.world_size:
            allowed = f"a multiple of {self.world_size} rows, the ranks"
            raise ValueError(f"x has shape {info.shape}; allowed: {allowed}")
        shape = (rows // self.world_size, *info.shape[1:])
        is_wide = out is not None and arrays.describe(out).dtype == _FLOAT32
        like = info._replace(dtype=_FLOAT32) if is_wide else info
        into = tensors.as_output(out, like, shape, target)
        total = tensors.cast(self._sum(x.reshape(-1), info), like.dtype).reshape(shape)
        if into is None:
            return tensors.as_result(total, info.dtype, target)
        tensors.put(into, total)
        return out

    def all_reduce(self, x: Any, out: Any = None) -> Any:
        """Sum the tensors of all ranks, of any shape; all ranks get the same bits.

        A reduce-scatter, then gathers of the sums in 8 bits, between nodes and then within them,
        each of which encodes.

        Args:
            x: As in ``reduce_scatter``.
            out: As in ``reduce_scatter``.

        Returns:
            ``out``, or a new array like ``x``.

        Raises:
            CollectiveError: If anything goes wrong after data were sent.
            TypeError: If an array has a wrong type or dtype.
            ValueError: If ``out`` does not fit.
        """
        x, info, target = _checked(x)
        is_wide = out is not None and arrays.describe(out).dtype == _FLOAT32
        like = info._replace(dtype=_FLOAT32) if is_wide else info
        into = tensors.as_output(out, like, info.shape, target)
        n = math.prod(info.shape)
        padded = tensors.empty((n + -n % self.world_size,), info.dtype, x)
        tensors.put(padded[:n], x.reshape(-1))
        tensors.fill(padded[n:], 0)
        gathered = self._sum(padded, info)
        for comm in self._gathers:
            gathered = comm.all_gather(gathered)
            self._count(*comm.trace(last=1))
        # Shape (N, M, each): the rank within a node came last.
        grid = gathered.reshape(self._within.size, self._between.size, -1)
        total = tensors.contiguous(grid.swapaxes(0, 1)).reshape(-1)[:n].reshape(info.shape)
        if into is None:
            return tensors.as_result(tensors.cast(total, info.dtype), info.dtype, target)
        tensors.put(into, total)
        return out

    def trace(self) -> list[TraceRecord]:
        """Records of the last calls: sums within the node, sums between nodes, then gathers.

        ``raw_bytes`` of sums are those of the dtype of ``x`` in the same two steps.
        """
        return [record for group in self._groups for record in group.trace()]

    def close(self) -> None:
        """Free work memory, and close both transports. Closing again does nothing."""
        for group in self._groups:
            group.close()

    def check(self) -> None:
        """Raise what decoding on a GPU has found so far. Waits for the device.

        Raises:
            CollectiveError: If received data are damaged.
        """
        for group in self._groups:
            group.check()

    def _check_grid(self, group: Session, other: Session) -> None:
        """Raise CollectiveError if ranks of `group` have other places or sizes in `other`."""
        call = Call(group.rank, "TwoLevel", 0, "", group.name)
        with call.stage("agree"):
            mine = np.array([other.rank, other.size])
            found = group.gather_plain(mine.view(np.uint8)).view(np.int64)
        if (found != mine).any():
            places = [tuple(row) for row in found.tolist()]
            detail = f"rank and world size are {places} at the other level; allowed: equal ones"
            raise call.failure("agree", detail)

    def _sum(self, x: Any, info: ArrayInfo) -> Any:
        """This rank's share of the sum of `x`, shape (ranks * n,): float32, shape (n,)."""
        inner, outer = self._within, self._between
        _, steps = self._steps
        nodes, each = outer.size, x.shape[0] // self.world_size
        flat = tensors.contiguous(tensors.cast(x, _FLOAT32))
        # A chunk is a share, at both levels.
        plan = steps.memory.plan(_FLOAT32, nodes * each, nodes)
        with (
            inner.call("reduce_scatter", "within nodes", info, _CHOICE, _FLOAT32) as call,
            outer.call("reduce_scatter", "between nodes", info, _CHOICE, _FLOAT32) as last,
        ):
            total = tensors.empty((nodes * each,), _FLOAT32, flat)
            send = steps.memory.chunks("send", [plan], flat)
            steps.memory.hold("send", send)
            self._rotated_sums(call, last, flat, info, total, plan, send.data[0])
            receive = steps.memory.receive("receive", [plan], flat)
            steps.comparisons.compare_shape(last, flat, info)
            digests = [last.digest(info, info.shape)] * nodes
            began = steps.begin_swap(last, send, receive, digests, digests)
            (buffer,) = steps.end_swap(last, began)
            last.raw_bytes = (nodes - 1) * each * info.dtype.itemsize
            # A failure from now on leaves ranks in step, at both levels.
            call.exchanged = last.exchanged = True
            steps.coding.decode(last, buffer, total, None)
            with last.stage("sum"):
                share, *others = total.reshape(nodes, each)
                for term in others:
                    tensors.add(share, term)
        self._count(call, last)
        return share

    def _count(self, *calls: Call | TraceRecord) -> None:
        for call in calls:
            self.raw_bytes += call.raw_bytes
            self.wire_bytes += call.wire_bytes

    def _rotated_sums(
        self,
        call: Call,
        last: Call,
        x: Any,
        info: ArrayInfo,
        total: Any,
        plan: Plan,
        out: Any,
    ) -> None:
        """Encode to `out` the sums over this node of the shares that ranks of this number own.

        `total`, float32, is their memory; `plan` says how they are encoded, a chunk for a node.
        """
        inner, outer = self._steps
        size, nodes = self._within.size, self._between.size
        n = x.shape[0]
        inner.comparisons.compare_shape(call, x, info)
        send = inner.coding.encode(call, [x], [inner.memory.plan(_FLOAT32, n, size * nodes)])
        terms = inner.memory.plan(_FLOAT32, plan.nelem, nodes)
        receive = inner.memory.receive("receive", [terms] * size, x)
        digests = [call.digest(info, info.shape)] * (size * nodes)
        send.write_descriptors(digests, 0)
        with call.stage("exchange"):
            # Of what is sent chunk m * N + l is for rank l; what comes lies rank by rank.
            xs = [_joined(send.parcels[peer::size]) for peer in range(size)]
            outs = [
                _joined(receive.parcels[at : at + nodes]) for at in range(0, nodes * size, nodes)
            ]
            self._within.transport.all_to_all_v(outs, xs)
        note = f" (number i is of rank i // {nodes})"
        inner.comparisons.compare_late(call, receive, digests, note=note)
        call.raw_bytes += (size - 1) * plan.nelem * info.dtype.itemsize
        static = terms.chunks * terms.static_stride
        call.wire_bytes += (size - 1) * (nodes * DESCRIPTOR_NBYTES + static)
        buffers = receive.buffers(inner.memory.status_words(receive.memory))
        tensors.clear(total)
        coded, key = self._between.codec, outer.coding.key(last)
        for source, buffer in enumerate(buffers):
            note = f" (from rank {source} of the node)"
            with call.stage("sum", note), np.errstate(all="ignore"):
                if source < size - 1:
                    self._within.codec.decode_add(buffer, total)
                else:
                    coded.decode_add_encode(buffer, total, key=key, out=out, chunks=nodes)
            inner.coding.decoded(call, buffer, note, source)


def _checked(x: Any) -> tuple[Any, ArrayInfo, arrays.Target]:
    x, info, target = tensors.as_input(x)
    if info.dtype.name not in Sdp4bit.dtypes:
        raise TypeError(f"x is {info.dtype.name}; allowed: {', '.join(Sdp4bit.dtypes)}")
    return x, info, target


def _joined(parcels: list[list[Any]]) -> list[Any]:
    return [piece for parcel in parcels for piece in parcel]


def _number(data: bytes) -> int:
    """63 bits that tell such bytes from others, and from 0."""
    found = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(found, "little") >> 1 | 1
