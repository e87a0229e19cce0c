"""Training that goes on when ranks fail: a group that is rebuilt of the ranks that are left.

To try it, run ``RANK=0 WORLD_SIZE=3 python example.py``, and so for the other ranks, in three
terminals; then kill one that is not the first. ``example.py`` is::

    import os
    import torch
    import torch.distributed as dist
    import tightwire as tw

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("localhost", 29400, is_master=rank == 0, wait_for_workers=False)
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}

    def gradients(comm):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 1000)).square().mean()
        loss.backward()
        group.average(model)
        return loss.item()

    with tw.surviving.Group(store, rank, ranks, state=state) as group:
        while group.steps < 1000:
            loss = group.step(gradients)
            optimizer.step()
            print(group.rank, group.world_size, group.steps, loss)

The source is NCCLX, section 5.3: replicas are whole or gone, and gradients are averaged over those
that take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..collectives.agreement import gather_plain
from ..collectives.communicator import Communicator
from ..collectives.side_stream import finished_future
from ..errors import CollectiveError
from ..transports.membership import NAME, Generation, Membership, Report
from ..transports.torch_dist import TorchDist
from ..weights.stateful import load_tensors, tensors_of
from ..weights.transfer import publish, subscribe
from .hooks import average, check_options, distributed

#: Bytes of gradients that are averaged at a time.
_BUCKET = 25 << 20
#: Generations of the same ranks that may fail in a row: another would fail too.
_ATTEMPTS = 3

_Result = TypeVar("_Result")


class _Link(TorchDist):
    """A transport whose errors do not wait for the others' word: they are asked by the store."""

    def _silent_ranks(self) -> str:
        return "the ranks that are left will agree on who that is"


class Group:
    """Replicas that train together, and go on without those that fail.

    Each rank is a replica of the model: a process or, with ``within``, several processes over which
    the model is sharded. A replica that loses a process is lost as a whole, with no effect on the
    others' processes. **A step that fails is repeated** by the replicas that are left, on a group
    of their own: a new *generation*, with ranks from 0 on in the old order. Connections are made
    over gloo, so tensors are on the CPU.

    Replicas agree by a store. A process of its own should hold it: when its process ends, no
    failure can be survived, and all ranks raise CollectiveError in the stage ``"store"``.

    Args:
        store: A store of ``torch.distributed`` that all ranks see, such as a ``TCPStore``, for this
            run alone.
        rank: Number of this replica.
        world_size: Number of replicas at the start.
        within: The process group of this replica's own processes. None: it is one process.
        state: Names to objects with ``state_dict()`` and ``load_state_dict()``, such as model and
            optimizer. At the start all replicas get the state of the first, and replicas that join
            get that of the others. None: all replicas start with equal weights, and none may join.
        timeout: Seconds that ranks wait for one another, in collectives and between them. It has to
            be longer than the difference between the slowest and the fastest rank of a step.
        silence: Seconds without a sign of life after which a process that takes no part in
            regrouping is lost. A thread gives that sign, so a process may compute for longer.
        **options: Arguments of ``Communicator``, such as ``codec``.

    Raises:
        CollectiveError: As ``step``.
        TypeError: If an option has no such name, or a wrong type.
        ValueError: If a value is not allowed.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        within: Any = None,
        state: Mapping[str, Any] | None = None,
        timeout: float = 60.0,
        silence: float = 5.0,
        **options: Any,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; allowed: 0 to {world_size - 1}")
        place, width = _place(within)
        self._prepare(state, timeout, options)
        self._membership = Membership(
            store,
            rank * width + place,
            width,
            timeout=timeout,
            silence=silence,
            count=world_size * width,
            takes=state is not None,
        )
        # The first state is that of the first replica.
        self._fresh = state is not None and rank > 0
        self._begin()

    @classmethod
    def join(
        cls,
        store: Any,
        *,
        state: Mapping[str, Any],
        within: Any = None,
        timeout: float = 60.0,
        silence: float = 5.0,
        wait: float = 600.0,
        **options: Any,
    ) -> Self:
        """Make a group of a replica that joins while the others train.

        They take it in between two steps, and one of them sends it the state. ``steps`` is then
        theirs.

        Args:
            store: The store of the others.
            state: As in ``Group``; objects of the same kinds as theirs.
            within: As in ``Group``. All processes of the replica call ``join``.
            timeout: As in ``Group``.
            silence: As in ``Group``.
            wait: Seconds to wait until the others take it in.
            **options: As in ``Group``, and as those of the others.

        Returns:
            The group.

        Raises:
            CollectiveError: If the others do not take it in, or all that have the state are lost.
            TypeError: As ``Group``.
            ValueError: As ``Group``.
        """
        group = cls.__new__(cls)
        place, width = _place(within)
        group._prepare(state, timeout, options)
        group._joined, group._fresh, group._wait = True, True, wait
        number = Membership.new_replica(store, width, timeout) if place == 0 else 0
        if width > 1:
            numbers = [number]
            dist.broadcast_object_list(numbers, group=within, group_src=0)
            number = numbers[0]
        group._membership = Membership(
            store, number * width + place, width, timeout=timeout, silence=silence, count=None
        )
        group._begin()
        return group

    def _prepare(
        self, state: Mapping[str, Any] | None, timeout: float, options: Mapping[str, Any]
    ) -> None:
        check_options(Group.__init__, options)
        for name, one in (state or {}).items():
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                kind = type(one).__name__
                raise TypeError(
                    f"state[{name!r}] is a {kind}; allowed: objects with state_dict() and "
                    "load_state_dict()"
                )
        self._state, self._timeout, self._options = state, timeout, options
        self._steps = 0
        self._entered = self._fresh = self._joined = self._growing = False
        self._asked, self._wait = 0, 0.0
        #: How many generations of the same ranks have failed since the last whole step.
        self._vain = 0
        self._control: TorchDist | None = None
        self._comm: Communicator | None = None
        #: What a call of this step has raised, which goes on to its end all the same.
        self._held = ""
        self._in_step = False
        self._closed = False

    @property
    def rank(self) -> int:
        """Number of this replica in the generation, from 0."""
        return self._membership.rank

    @property
    def world_size(self) -> int:
        """Number of replicas in the generation."""
        return len(self._membership.column())

    @property
    def generation(self) -> int:
        """Number of the generation: how many times the group has changed."""
        return self._membership.generation.number

    @property
    def lost(self) -> dict[int, str]:
        """Replicas that the last change of the group has cost, and why.

        Their numbers are those of the start, or for replicas that had joined later ones.
        """
        width = self._membership.width
        found = self._membership.generation.lost.items()
        return {int(member) // width: why for member, why in found}

    @property
    def steps(self) -> int:
        """Number of steps that were whole, over all generations."""
        return self._steps

    @property
    def comm(self) -> Communicator:
        """The communicator of this generation, of the processes with this one's place."""
        if self._comm is None:
            raise self._error("start", "the group is closed" if self._closed else "no generation")
        return self._comm

    def step(self, call: Callable[[Communicator], _Result]) -> _Result:
        """Compute gradients together; again, with those that are left, if that fails.

        When it returns, all replicas of the generation have had their gradients averaged: then is
        the time for ``optimizer.step()``. All replicas call it equally often.

        Args:
            call: Computes and averages gradients, with the communicator of the generation. It is
                called again if the step fails, so it must change nothing but gradients: zero them
                first, and leave the optimizer to the time after the step.

        Returns:
            What ``call`` has returned.

        Raises:
            CollectiveError: In the stage ``"lost"``, if the others go on without this process:
                it may ``join`` again. In the stage ``"store"``, if the store does not answer.
            Exception: What else ``call`` raises. This process then leaves the group.
        """
        if self._closed:
            raise self._error("start", "the group is closed")
        try:
            self._membership.check()
            if self._growing:
                self._regroup("replicas ask to join")
            return self._repeated(call)
        except BaseException as error:
            own = isinstance(error, CollectiveError) and error.collective == NAME
            if not own:
                error.add_note(f"replica {self.rank} leaves its group, which goes on without it")
            # For a process that is lost already this changes nothing.
            self._leave(str(error) or type(error).__name__)
            raise

    def average(self, parameters: Any) -> None:
        """Overwrite gradients by their means over the replicas; within ``step``.

        A failure is not raised here, but ends the step: collectives of other groups that follow in
        it stay in step. Outside of ``step`` it is raised at once. Sums are made in float32 in the
        order of ranks, divided by the number of replicas there and rounded once: all ranks get the
        same bits.

        Args:
            parameters: A module, or parameters. Where one has no gradient, it gets one of zeros. Of
                a DTensor this rank's shard is averaged.

        Raises:
            CollectiveError: Outside of ``step``, if a replica is lost or the group is closed.
            TypeError: If a gradient is sparse.
        """
        if isinstance(parameters, torch.nn.Module):
            parameters = parameters.parameters()
        self.average_tensors(_gradients(parameters))

    def average_tensors(self, tensors: Iterable[Any]) -> None:
        """Overwrite tensors by their means over the replicas, as ``average`` does.

        Args:
            tensors: Of any shapes and float dtypes, the same on all replicas.

        Raises:
            CollectiveError: As by ``average``.
            TypeError: If one is sparse.
        """
        for bucket in _buckets(tensors):
            flat = torch.cat([x.reshape(-1) for x in bucket])
            if not self._average(flat):
                return
            for x, mean in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
                x.copy_(mean.view_as(x))

    def _average(self, x: Any) -> bool:
        """Whether the step goes well so far, and `x`, 1-D, has become its mean."""
        if not self._in_step:
            # Nothing would tell of the error later.
            average(self.comm, x)
            return True
        if self._held:
            return False
        try:
            average(self.comm, x)
        except CollectiveError as error:
            self._held = str(error)
        if self._held:
            # Others may wait for this rank, which takes part in nothing more of this step. The
            # error, which is gone by now, would have kept the connections.
            self._disconnect()
        return not self._held

    def close(self) -> None:
        """Leave the group. The others go on; closing again does nothing."""
        self._leave("it was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """`close()`."""
        self.close()

    def _leave(self, why: str) -> None:
        self._closed = True
        self._disconnect()
        # Without a store nobody is left who could be told.
        with suppress(CollectiveError):
            self._membership.close(why)

    def _repeated(self, call: Callable[[Communicator], _Result]) -> _Result:
        number = self._steps
        while True:
            self._ready()
            try:
                self._in_step = True
                try:
                    result = call(self.comm)
                finally:
                    self._in_step = False
                if self._held:
                    raise self._error("average", self._held)
                self._entered = True
                self._commit()
                return result
            except CollectiveError as error:
                if not self._concerns_replicas():
                    raise
                why = str(error)
            self._regroup(why)
            if self._steps > number:
                # The others had all of it too.
                return result

    def _concerns_replicas(self) -> bool:
        """Whether what a step has raised is about connections between replicas.

        Else it is about other ones that the step uses, such as those within the replica.
        """
        broken = self._comm is None or self._comm.session.broken is not None
        return bool(self._held) or self._entered or broken

    def _commit(self) -> None:
        """End a step, here where all ranks have all gradients: who gets past this knows it.

        Ranks that fail here tell so when they regroup. The step then counts if all that are left
        have come here.
        """
        member = self._membership
        first = member.generation.members[0] == member.number
        asked = first and member.asked()
        with self._connected("commit"):
            assert self._control is not None
            flags = gather_plain(self._control, np.array([asked], np.uint8))
        self._growing = bool(flags.any())
        self._steps, self._entered, self._vain = self._steps + 1, False, 0

    def _begin(self) -> None:
        try:
            if self._joined:
                self._ask()
            self._ready()
        except BaseException as error:
            self._leave(str(error) or type(error).__name__)
            raise

    def _ready(self) -> None:
        """Have connections, and the state on all ranks, of a generation that is whole."""
        while self._comm is None:
            try:
                self._connect()
                return
            except CollectiveError as error:
                if error.stage == "store":
                    raise
                why = str(error)
            self._regroup(why)

    def _regroup(self, why: str) -> None:
        """Enter the next generation; connections are made later."""
        self._disconnect()
        self._held = ""
        member, before = self._membership, self._membership.generation.members
        report = Report(self._steps, self._entered, self._fresh, self._joined)
        self._entered = False
        try:
            generation = member.regroup(report)
        except CollectiveError as error:
            waits = self._joined and self._fresh and member.generation.members
            if error.stage != "lost" or not waits:
                raise
            generation = self._ask()
        same = generation.members == before
        self._vain = self._vain + 1 if same else 0
        if self._vain == _ATTEMPTS:
            raise self._error(
                "regroup", f"{_ATTEMPTS} generations of the same ranks have failed: {why}"
            )
        self._steps, self._growing = generation.step, False

    def _ask(self) -> Generation:
        self._asked += 1
        generation = self._membership.ask(self._asked, self._wait)
        self._steps = generation.step
        return generation

    def _connect(self) -> None:
        member = self._membership
        member.meet("connect", self._timeout)
        members = member.generation.members
        self._control = self._link("control", members)
        data = self._link(f"data/{member.number % member.width}", member.column())
        try:
            comm = Communicator(data, **{"name": NAME, **self._options})
            self._transfer()
        except BaseException:
            data.close()
            raise
        self._comm = comm

    def _link(self, what: str, members: Sequence[int]) -> TorchDist:
        """Connections of some members, this one among them."""
        rank = members.index(self._membership.number)
        with self._connected("connect"):
            return _Link.by_store(
                self._membership.prefix(what), rank, len(members), timeout=self._timeout
            )

    def _transfer(self) -> None:
        """Send the state to the members that lack it: of each place one does."""
        member = self._membership
        lacking, column = member.generation.fresh, member.column()
        if not lacking or self._state is None:
            return
        root = next((m for m in column if m not in lacking), column[0])
        takers = [m for m in column if m in lacking and m != root]
        if takers and member.number in (root, *takers):
            with closing(self._link(f"state/{root}", [root, *takers])) as link:
                tensors = tensors_of(self._state)
                if member.number == root:
                    publish(tensors, link, keep=False).send()
                else:
                    subscribe(tensors, link).update()
                    load_tensors(self._state, tensors)
        self._fresh = False
        member.meet("state")

    def _disconnect(self) -> None:
        if self._comm is not None:
            self._comm.close()
        if self._control is not None:
            self._control.close()
        self._comm = self._control = None

    @contextmanager
    def _connected(self, stage: str) -> Iterator[None]:
        """Make a CollectiveError of what the network says."""
        try:
            yield
        except CollectiveError:
            raise
        except (RuntimeError, OSError) as error:
            raise self._error(stage, str(error)) from error

    def _error(self, stage: str, detail: str) -> CollectiveError:
        return CollectiveError(self.rank, NAME, self.generation, stage, detail)


def register(model: Any, group: Group) -> None:
    """Have a DistributedDataParallel model average its gradients over a group.

    The model is one of this replica alone: its process group has one rank. ``backward()`` within
    ``step`` then ends as if ``Group.average`` followed. Gradients are averaged when the last bucket
    is there, and not bucket by bucket: DistributedDataParallel forms its buckets anew after its
    first step, so that a replica that joins has other ones than those that have trained.

    Args:
        model: The DistributedDataParallel model, whose parameters all get gradients in each step.
        group: The group.

    Raises:
        TypeError: If ``model`` is another model.
        ValueError: If its process group has several ranks, or it allows unused parameters.

    Example:
        ``dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)`` makes a
        process group of this process alone.
    """
    size = distributed(model).process_group.size()
    if size != 1:
        raise ValueError(
            f"the model's process group has {size} ranks; allowed: 1, so that none is missed"
        )
    if model.find_unused_parameters or model.static_graph:
        # It asks its own group, which is this replica, whether anybody uses a parameter.
        raise ValueError(
            "the model has find_unused_parameters or static_graph; allowed: neither. "
            "Group.average takes parameters without gradients"
        )
    model.register_comm_hook(_Buckets(model, group), _ddp_hook)


class _Buckets:
    """The gradients of a backward pass, until all are there."""

    def __init__(self, model: Any, group: Group) -> None:
        self._order = {p: i for i, p in enumerate(model.parameters())}
        self._group = group
        self._gradients: dict[int, Any] = {}

    def add(self, bucket: Any) -> None:
        """Take the gradients of a bucket; average all if it is the last."""
        if bucket.index() == 0:
            # Another pass may have ended with an error.
            self._gradients.clear()
        for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._gradients[self._order[p]] = gradient
        if bucket.is_last():
            found, self._gradients = self._gradients, {}
            self._group.average_tensors([found[i] for i in sorted(found)])


# DDP would not take annotations that are strings.
def _ddp_hook(state, bucket):  # type: ignore[no-untyped-def]
    state.add(bucket)
    return finished_future(bucket.buffer(), None)


def _place(within: Any) -> tuple[int, int]:
    """Number of this process in its replica, and of the replica's processes."""
    return (0, 1) if within is None else (dist.get_rank(within), dist.get_world_size(within))


def _gradients(parameters: Iterable[Any]) -> Iterator[Any]:
    """What is averaged of each parameter that is trained."""
    for p in parameters:
        if not p.requires_grad:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        yield p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad


def _buckets(tensors: Iterable[Any]) -> Iterator[list[Any]]:
    """Tensors of one dtype, of not many bytes together."""
    kinds: dict[Any, list[Any]] = {}
    for x in tensors:
        if x.layout != torch.strided:
            raise TypeError(f"a {x.dtype} of shape {tuple(x.shape)} is sparse; allowed: dense ones")
        bucket = kinds.setdefault(x.dtype, [])
        if bucket and sum(y.nbytes for y in bucket) + x.nbytes > _BUCKET:
            yield bucket
            bucket = kinds[x.dtype] = []
        if x.numel():
            bucket.append(x)
    yield from (bucket for bucket in kinds.values() if bucket)
