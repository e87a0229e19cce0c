"""Training of sharded models by SDP4Bit: weights as differences, gradients in two levels.

After Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for
LLM Training" (NeurIPS 2024): quantization of weight differences (qWD) and two-level gradient
quantization smoothed by a Hadamard transform (TLq-HS). specs/sdp4bit.md has the arithmetic.

Weights, on every rank (here two threads are the ranks)::

    import numpy as np
    import tightwire as tw
    from tightwire.adapters.transports.threads import run_ranks
    from tightwire.adapters.training.sharded import WeightDifferences

    def weights(transport):
        gathers = WeightDifferences(tw.Communicator(transport))
        shard = np.random.default_rng(transport.rank).normal(0, 0.02, 5000).astype(np.float32)
        for _ in range(3):
            full = gathers.gather("layer", shard)
            shard = shard - np.float32(1e-3) * np.sign(shard)
        return full

    print(run_ranks(2, weights)[0].shape)

Gradients, in a grid of nodes, each with as many ranks, by a ``NodeCommunicator`` with a codec for
each level::

    from tightwire.adapters.transports.threads import run_grid

    def gradients(within, between):
        near = tw.Communicator(within, tw.codec("sdp4bit", bits=8))
        far = tw.Communicator(between, tw.codec("sdp4bit", bits=4))
        comm = tw.NodeCommunicator(near, far)
        x = np.random.default_rng(comm.rank).normal(0, 1e-3, 4 * 5000).astype(np.float32)
        return comm.reduce_scatter(x)

    print(run_grid(2, 2, gradients)[0].shape)
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import arrays
from ...arrays import ArrayInfo
from ...codec import codec
from ...codecs.sdp4bit import Sdp4bit
from ...formats.dtypes import BY_NAME
from ..collectives import tensors
from ..collectives.calls import Call, TraceRecord
from ..collectives.cost import Choice
from ..collectives.nodes import AnyCommunicator, NodeCommunicator
from ..collectives.session import Options, Session
from ..collectives.steps import Steps
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

    With a ``NodeCommunicator`` differences go between nodes: a rank has a replica of the shards of
    its number alone, and the ranks of a node gather theirs as they are.

    Source: SDP4Bit (NeurIPS 2024), quantization of weight differences (qWD).

    Args:
        comm: A communicator with a lossless codec, which may be one of nodes.
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
        comm: AnyCommunicator,
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
        self._nodes = comm if isinstance(comm, NodeCommunicator) else None
        #: Of the ranks with whom this one has replicas.
        self._peers = comm.between if isinstance(comm, NodeCommunicator) else comm
        #: Damage is never added to a replica: verified at once.
        options = Options(verify=True, seed=seed)
        self._group = Session(self._peers.transport, chosen, options, round_trips=False)
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
        ranks = self.comm.world_size
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
        if self._nodes is not None:
            values = self._nodes.spread_in_node(values)
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
        """The state for a checkpoint, equal on all ranks (of nodes: on those of one number).

        It may be left out: weights are then sent in full once.

        Returns:
            ``"replicas"`` has copies by name, shape ``(world_size * n,)``, ``"world_size"`` the
            number of ranks that have them, ``"number"`` that of this rank in its node.
        """
        replicas = {name: tensors.copied(r.values) for name, r in self._replicas.items()}
        return {"replicas": replicas, "world_size": self._group.size, "number": self._number}

    @property
    def _number(self) -> int:
        """Of this rank in its node."""
        return 0 if self._nodes is None else self._nodes.within.rank

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all replicas by those of a state. They move to the devices of their shards.

        Ranks compare a digest of them at the next gather of each name.

        Args:
            state: A result of ``state_dict``.

        Raises:
            ValueError: If the state is of another number of ranks or does not say, or of ranks with
                another number in their nodes, as these have other shards.
        """
        ranks, number = state.get("world_size"), state.get("number", 0)
        if ranks != self._group.size:
            what = "says no world_size" if ranks is None else f"is of {ranks} ranks"
            raise ValueError(f"state {what}; allowed: of {self._group.size} ranks, or none")
        if number != self._number:
            raise ValueError(f"state is of number {number} in a node; allowed: {self._number}")
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
        self._peers.all_gather(x, values)
        # A replica is to be nobody's guess.
        self._peers.check()
        for record in self._peers.trace(last=1):
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


def _number(data: bytes) -> int:
    """63 bits that tell such bytes from others, and from 0."""
    found = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(found, "little") >> 1 | 1
