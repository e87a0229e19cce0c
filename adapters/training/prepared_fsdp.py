"""Hooks for FSDP2 that wait for nothing: prepared calls, judged when their results are needed.

``fsdp.compress(model, route=...)`` sets them.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ...planning import integer
from ..collectives.kept_messages import Budget, KeptMessage
from ..collectives.prepared_work import Work
from ..errors import CollectiveError
from .gathering_ahead import GatheringAhead, forward_context, is_outermost
from .leaving import ModuleHooks, param_groups
from .prepared_hooks import EndOfBackward, Pending, PreparedHook, Route
from .shard_state import ShardState, shard_state

#: Bytes of encoded shards that are kept on the host, unless the user says how many.
_KEEP_NBYTES = 256 << 20
#: Modules that are gathered ahead over a network, unless the user says how many. FSDP holds the
#: parameters of so many modules more.
_AHEAD = 2
#: Reduce-scatters whose terms are kept until they are known to be right. FSDP keeps as many.
_LATE = 2


class GatherWork(dist.Work):  # type: ignore[misc, unused-ignore]
    """What FSDP waits for before it uses gathered parameters.

    The host waits only if a message may not have fitted. FSDP itself has its stream wait. Outside
    of backward damage is raised here if it is known by now.
    """

    def __init__(self, hook: PreparedGather, work: Work) -> None:
        super().__init__()
        self._hook, self._work = hook, work

    def wait(self, timeout: Any = None) -> bool:
        """See ``prepared_work.Work``."""
        # What was wrong with it is raised each time: FSDP keeps it, and may ask again.
        if self._work.may_change or self._work.judged:
            return self._hook.wait_for(self._work)
        self._hook.tell()
        return True


class PreparedGather(PreparedHook):
    """All-gather of parameters, for ``FSDPModule.set_custom_all_gather``.

    Modules of one size share memory. FSDP waits for what the hook returns before it uses the
    parameters; then they are known to fit. Damage is raised before the backward returns that uses
    them; before the outermost forward returns, if there is nothing in its result to differentiate;
    and in any forward as soon as it is known. It ends the calls of this hook.

    Args:
        route: How bytes travel.
        keep_nbytes: As in ``fsdp.compress``.
        ahead: As there.
        **options: Arguments of ``PreparedCalls``.

    Raises:
        TypeError: If ``keep_nbytes`` or ``ahead`` is not an integer.
        ValueError: If it is negative.
    """

    purpose = "FSDP: PreparedGather"

    def __init__(
        self,
        route: Route,
        *,
        keep_nbytes: int | None = None,
        ahead: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(route, **options)
        for name, value in (("keep_nbytes", keep_nbytes), ("ahead", ahead)):
            if value is not None and integer(name, value) < 0:
                raise ValueError(f"{name} is {value}; allowed: at least 0, or None")
        self._keep_nbytes = keep_nbytes
        if ahead is None:
            ahead = _AHEAD if route == "network" else 0
        #: By process group and what FSDP modules of one root have in common.
        self._ahead: dict[Any, GatheringAhead] = collections.defaultdict(
            functools.partial(GatheringAhead, ahead)
        )
        self._looks_ahead = ahead > 0
        # Ranks would gather modules in other orders.
        self.common = f"ahead {ahead}"
        #: Of hooks that tell when a forward has ended.
        self._handles: list[Any] = []
        self._budget: Budget | None = None
        self._kept: list[KeptMessage] = []
        self._made = Pending(self.end_calls)
        self._end = EndOfBackward(self.judge)
        #: Gathers outside of backward so far.
        self.forwards = 0

    def of(self, module: Any) -> _Gather:
        """This hook for one FSDP module, whose encoded shard may be kept.

        Args:
            module: The module.
        """
        # Also a forward that raises ends.
        handle = module.register_forward_hook(self._end_forward, always_call=True)
        self._handles.append(handle)
        return _Gather(self, module, handle)

    def _end_forward(self, module: Any, _: Any, result: Any) -> None:
        """Called behind the forward of every FSDP module."""
        if torch._C._current_graph_task_id() != -1 or not is_outermost(module):
            return
        context = forward_context(module)
        for (_, own), ahead in list(self._ahead.items()):
            if own is context:
                ahead.end_forward()
        # That of a forward that has raised is None.
        values = tree_leaves(result)
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        differentiable = [x for x in tensors if x.grad_fn is not None]
        for x in differentiable:
            x.register_hook(self._judge_behind)
        if not differentiable and (tensors or not torch.is_grad_enabled()):
            # No backward follows that could be told.
            self.judge()

    def _judge_behind(self, gradient: Any) -> None:
        """Called in the backward of a forward's result, also if that gathers and sums nothing."""
        self._end.ask()

    @property
    def sent_again(self) -> int:
        """Gathers that have sent a shard as an earlier one had encoded it."""
        return sum(kept.sent_again for kept in self._kept)

    def keep(self, device: torch.device) -> KeptMessage | None:
        """Memory for the message of a module; None if nothing is kept.

        Args:
            device: Where the module is.
        """
        compares = known_at_once(device)
        nbytes = self._keep_nbytes
        if nbytes is None:
            nbytes = _KEEP_NBYTES if compares else 0
        if not nbytes:
            return None
        if self._budget is None:
            self._budget = Budget(nbytes)
        self._kept.append(KeptMessage(self._budget, compares=compares))
        return self._kept[-1]

    def begin(self, group: Any, module: Any) -> None:
        """Say that a module is about to be gathered, outside of backward.

        Args:
            group: The process group.
            module: The FSDP module.
        """
        with self._lock:
            self._repeats(group, module)
            if self._looks_ahead:
                self._ahead[group, forward_context(module)].note(module)

    def close(self) -> None:
        """See ``PreparedHook``."""
        super().close()
        for handle in self._handles:
            handle.remove()
        for ahead in self._ahead.values():
            ahead.end()
        self._ahead.clear()
        for kept in self._kept:
            kept.free()

    def tell(self) -> None:
        """Raise what is known to be wrong by now; in backward that is left to its end.

        Raises:
            CollectiveError: If a rank was late, or bytes were damaged.
        """
        if torch._C._current_graph_task_id() == -1:
            self._made.take_done()
            self._made.tell()
            self._refuse()

    def judge(self) -> None:
        """Raise what is wrong with gathers that were made so far; waits for them.

        Raises:
            CollectiveError: If a rank was late, or bytes were damaged.
        """
        self._made.judge()
        self._refuse()

    def _refuse(self) -> None:
        """Raise if calls have ended: FSDP may still hold parameters that were damaged."""
        for calls in self._calls.values():
            refusal = calls.refusal("all_gather")
            if refusal is not None:
                raise refusal

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Uninitialised memory for FSDP to communicate from or to.

        Args:
            size: Shape.
            dtype: Element type.
            device: Device.
        """
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        """Fill ``output_tensor``, shape ``(ranks * n,)``, with all ranks' ``input_tensor``.

        Args:
            output_tensor: The result.
            input_tensor: Shape ``(n,)``; it may lie in the output.
            group: The process group.
            async_op: Ignored: the result is a Work in any case.

        Returns:
            A Work, which raises ``CollectiveError`` if a rank was late, or bytes were damaged; None
            if the process group itself has made the call.
        """
        return self.gather(output_tensor, input_tensor, group)

    def gather(
        self,
        output_tensor: Any,
        input_tensor: Any,
        group: Any,
        kept: KeptMessage | None = None,
        hook: _Gather | None = None,
    ) -> Any:
        """See ``__call__``; ``kept`` as in ``prepared_gathers.AllGather``, of a module its hook."""
        own = None if hook is None else hook.own
        key = input_tensor.device, input_tensor.numel(), input_tensor.dtype
        with self._lock:
            if not self._end.ask():
                self.forwards += 1
                self.tell()
            gather = self._get(group, key, lambda calls: calls.all_gather(input_tensor))

            def native() -> Any:
                if own is not None:
                    return own(output_tensor, input_tensor, group)
                return self._calls[group].transport.all_gather(output_tensor, input_tensor)

            def ours() -> None:
                self.wait_for(gather(input_tensor, output_tensor))

            native_is_faster = self._native(group, key, native, ours, input_tensor)
            if hook is not None and hook.together is not None:
                hook.together.found("all_gather", group, native_is_faster)
            if native_is_faster:
                return native()
            work = gather(input_tensor, output_tensor, kept)
            if hook is not None and work.may_change and not known_at_once(input_tensor.device):
                hook.note(work)
            self._count(work)
            self._made.append(work)
            self._made.take_done()
        return GatherWork(self, work)


def known_at_once(device: torch.device) -> bool:
    """Whether nobody has to wait for what was decoded on a device.

    Args:
        device: The device.
    """
    return bool(device.type == "cpu")


class _Gather:
    """A ``PreparedGather`` for one module; `handle` is that of what follows its forwards."""

    def __init__(self, hook: PreparedGather, module: Any, handle: Any) -> None:
        self._hook = hook
        self._module = module
        #: Called when another hook takes its place.
        self.let_go: Callable[[], None] = handle.remove
        self._kept: KeptMessage | None = None
        self._asked = False
        #: From a gather outside of backward to the first one in backward: see ``shard_state``.
        self._span = 0
        #: The last gather outside of backward, with what it gathered.
        self._forward: tuple[ShardState, Work] | None = None
        #: PyTorch's own communication, and what leaves with this hook; with the route "auto".
        self.own: Any = None
        self.together: ModuleHooks | None = None

    def forget(self, group: Any) -> None:
        """See ``PreparedHook``."""
        self._hook.forget(group, self._module)
        if self._kept is not None:
            self._kept.free()

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """As PyTorch's own, where that is known."""
        owner = self._hook if self.own is None else self.own
        memory: torch.Tensor = owner.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        """See ``PreparedGather``."""
        if not self._asked:
            self._asked, self._kept = True, self._hook.keep(input_tensor.device)
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward:
            self._hook.begin(group, self._module)
        self._span += not in_backward
        if self._kept is not None and not self._kept.compares:
            self._kept.state = self._state()
        try:
            return self._hook.gather(output_tensor, input_tensor, group, self._kept, self)
        finally:
            # Nobody knows what a later backward follows.
            self._span += in_backward

    def _state(self) -> ShardState | None:
        """What is gathered now."""
        return shard_state(param_groups(self._module), self._span)

    def note(self, work: Work) -> None:
        """Note a gather by this hook, for which the host may have to wait.

        What has fitted in forward is not waited for in backward. All ranks must find the same here,
        or some would make a call once more, and others not. So only what all of them know counts,
        and not that one has changed its own shard: if that does not fit any more, it is an error on
        all ranks.

        Args:
            work: Its work.
        """
        kept, forward = self._kept, self._forward
        state = self._state() if kept is None or kept.compares else kept.state
        if torch._C._current_graph_task_id() == -1:
            self._forward = None if state is None else (state, work)
        elif (
            state is not None
            and forward is not None
            and state.is_of_the_step_of(forward[0])
            and work.has_space_for(forward[1])
        ):
            # It is judged before backward returns.
            work.note_fit()


class PreparedScatter(PreparedHook):
    """Reduce-scatter of gradients, for ``FSDPModule.set_custom_reduce_scatter``.

    Sums are made in float32 in the order of ranks, scaled there and rounded once. Whether all terms
    fitted is looked at two modules later, and for the last ones before backward returns. What did
    not fit is summed again, exactly, and put or added where it belongs: gradients have the same
    bits. Modules whose gradients go elsewhere at once are judged at once: those with an all-reduce
    hook, with gradients on the CPU, and with hooks of gradients.

    Args:
        route: How bytes travel.
        wire: Dtype in which float32 gradients travel. None: as they are.
        gathers: The hook of the same modules' parameters, which is judged with this one.
        **options: Arguments of ``PreparedCalls``.
    """

    purpose = "FSDP: PreparedScatter"

    def __init__(
        self,
        route: Route,
        wire: str | None = None,
        *,
        gathers: PreparedGather | None = None,
        **options: Any,
    ) -> None:
        super().__init__(route, **options)
        self._wire = wire
        self._gathers = gathers
        #: Works that may have to be made once more, and others.
        self._late = Pending(self.end_calls)
        self._settled = Pending(self.end_calls)
        self._end = EndOfBackward(self._judge)
        if gathers is not None:
            self.partners, gathers.partners = [gathers], [self]

    def of(self, module: Any) -> _Scatter:
        """This hook for one FSDP module.

        Args:
            module: The module.
        """
        return _Scatter(self, module)

    def reduce(self, hook: _Scatter, output: Any, x: Any, group: Any, op: Any) -> None:
        """Fill `output`, shape (n,), with this rank's share of the sum of `x`."""
        module = hook.module
        kind, factor = kind_and_factor(op)
        scale = {dist.ReduceOp.SUM: None, dist.ReduceOp.AVG: 1 / group.size()}.get(kind, factor)
        wire = self._wire if x.dtype == torch.float32 else None
        key = x.device, x.numel(), x.dtype, wire
        # Also where this module's sums are judged at once: gathers are not.
        in_backward = self._end.ask()
        with self._lock:
            self._repeats(group, module)
            scatter = self._get(
                group,
                key,
                # The factor may be another one in every step.
                lambda calls: calls.reduce_scatter(
                    x, wire=wire, dtype=None if wire is None else "float32"
                ),
            )

            def native() -> None:
                if hook.own is not None:
                    hook.own(output, x, group, op)
                    return
                self._calls[group].transport.reduce_scatter(output, x)
                if scale is not None:
                    output.mul_(scale)

            def ours() -> None:
                self.wait_for(scatter(x, output, scale=scale))

            native_is_faster = self._native(group, key, native, ours, x)
            if hook.together is not None:
                hook.together.found("reduce_scatter", group, native_is_faster)
            if native_is_faster:
                native()
                return
            correct = self._of_this_step(_correction(module, output, scale))
            work = scatter(x, output, correct, scale=scale)
            self._count(work)
        if correct is None or not in_backward:
            self.wait_for(work)
            return
        # All ranks make calls once more at the same places, however far their devices are.
        late = self._late if work.may_change else self._settled
        late.append(work)
        while len(self._late) > _LATE:
            self.wait_for(self._late.popleft())
        self._settled.take_done()

    def _of_this_step(self, correct: Callable[[Any], None] | None) -> Callable[[Any], None] | None:
        """`correct`, which does nothing any more when a forward has followed.

        Then its backward has raised, and gradients are those of another one.
        """
        gathers = self._gathers
        if correct is None or gathers is None:
            return correct
        step = gathers.forwards
        return lambda exact: correct(exact) if gathers.forwards == step else None

    def _judge(self) -> None:
        problem: CollectiveError | None = None
        parts = [self._late.judge, self._settled.judge]
        if self._gathers is not None:
            parts.append(self._gathers.judge)
        for judge in parts:
            try:
                judge()
            except CollectiveError as error:
                problem = problem or error
        if problem is not None:
            raise problem


class _Scatter:
    """A ``PreparedScatter`` for one module."""

    def __init__(self, hook: PreparedScatter, module: Any) -> None:
        self._hook = hook
        self.module = module
        #: As of a `_Gather`.
        self.own: Any = None
        self.together: ModuleHooks | None = None

    def forget(self, group: Any) -> None:
        """See ``PreparedHook``."""
        self._hook.forget(group, self.module)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """As PyTorch's own, where that is known."""
        if self.own is None:
            return torch.empty(*size, dtype=dtype, device=device)
        memory: torch.Tensor = self.own.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Fill ``output_tensor``, shape ``(n,)``, with this rank's share of the sum.

        Args:
            output_tensor: The result.
            input_tensor: Shape ``(ranks * n,)``.
            group: The process group.
            op: ReduceOp.SUM, AVG or PREMUL_SUM.
            async_op: Ignored.

        Raises:
            CollectiveError: If the exchange fails; for damage here, or before backward returns.
            ValueError: For another ``op``.
        """
        self._hook.reduce(self, output_tensor, input_tensor, group, op)


def _correction(module: Any, output: Any, scale: float | None) -> Callable[[Any], None] | None:
    """What puts an exact sum where FSDP has put `output`, which was -0.0; None if nobody can."""
    groups = param_groups(module)
    # Sums that FSDP divides afterwards, or hands on.
    if len(groups) != 1 or scale is None or groups[0]._all_reduce_hook is not None:
        return None
    (group,) = groups
    params = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    if sum(p.padded_sharded_param_size.numel() for p in params) != output.numel():
        return None
    if _is_replicated(group) or any(_goes_elsewhere(p) for p in params):
        return None

    def correct(exact: Any) -> None:
        output.copy_(exact)
        at, place = 0, output.untyped_storage().data_ptr()
        for p in params:
            grad = p.sharded_param.grad._local_tensor
            if grad.untyped_storage().data_ptr() != place:
                part = exact.to(grad.dtype).as_strided(
                    p.sharded_size, p.contiguous_sharded_stride, at
                )
                grad += part
            at += p.padded_sharded_param_size.numel()

    return correct


def _is_replicated(group: Any) -> bool:
    """Whether FSDP sums a group's gradients over replicas, too."""
    return bool(group.mesh_info.mesh.ndim > 1)


def _goes_elsewhere(p: Any) -> bool:
    """Whether somebody takes a parameter's gradient before backward returns."""
    hooks = getattr(p.sharded_param, "_post_accumulate_grad_hooks", None)
    return bool(hooks) or p.offload_to_cpu


def kind_and_factor(op: Any) -> tuple[Any, Any]:
    """The kind of a ReduceOp, and the factor of PREMUL_SUM."""
    for kind in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        if op == kind:
            return kind, None
    if op == dist.ReduceOp.PREMUL_SUM:
        # The factor shows nowhere else.
        return dist.ReduceOp.PREMUL_SUM, op.__getstate__()[1]
    raise ValueError(f"op is {op}; allowed: SUM, AVG and PREMUL_SUM")
