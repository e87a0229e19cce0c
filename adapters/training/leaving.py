"""Communication that hooks leave to PyTorch, for as long as that is faster.

Where FSDP2 lets a hook be replaced, its own communication is put back. A counter in front of each
module's gather has the hooks come back and look again. A hook of DistributedDataParallel stays, and
hands buckets on to PyTorch's own hook.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..collectives.faster import AGAIN

Kind = Literal["all_gather", "reduce_scatter"]


def param_groups(module: Any) -> list[Any]:
    """What FSDP itself has of the parameters of an FSDP module; nothing public tells.

    Args:
        module: The FSDP module.

    Returns:
        Its ``FSDPParamGroup`` objects.
    """
    fsdp = module._get_fsdp_state()
    groups = getattr(fsdp, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    # Versions of PyTorch without that have one at most.
    return [] if fsdp._fsdp_param_group is None else [fsdp._fsdp_param_group]


def gather_groups(module: Any) -> set[Any]:
    """The process groups by which this rank gathers an FSDP module.

    Args:
        module: The FSDP module.

    Returns:
        The groups: with an integer as ``reshard_after_forward`` one for forward, and one for
        backward.
    """
    groups = param_groups(module)
    infos = [info for g in groups for info in (g.mesh_info, g.post_forward_mesh_info)]
    return {info.shard_process_group for info in infos if info is not None}


class Communication:
    """One kind of communication of an FSDP module: PyTorch's own, or a hook in its place.

    Args:
        module: The FSDP module.
        kind: Which.
    """

    def __init__(self, module: Any, kind: Kind) -> None:
        self._module, self._kind = module, kind
        self._hook: Any = None
        #: PyTorch's own, or a hook that the user has set; never a hook of this package. Where one
        #: was set without `install`, nobody knows what was there before it: PyTorch's default.
        self.own: Any = self.current()
        if self.own is None or _is_of_this_package(self.own):
            newest = self._installed().get(kind)
            self.own = _default(kind) if newest is None else newest.own

    def _installed(self) -> dict[Kind, Communication]:
        """By which object a hook was installed last, by kind, for as long as the module lives."""
        found: dict[Kind, Communication] = vars(self._module._get_fsdp_state()).setdefault(
            "_tightwire", {}
        )
        return found

    def current(self) -> Any:
        """What is set; None if the module has no parameters."""
        groups = param_groups(self._module)
        return getattr(groups[0], f"_{self._kind}_comm", None) if groups else None

    def set(self, comm: Any) -> None:
        """Have the module's later calls be those of `comm`."""
        getattr(self._module, f"set_custom_{self._kind}")(comm)

    def install(self, hook: Any) -> None:
        """Set a hook of this package, which replaces others for good, also one that is away.

        What it replaces is told, if it has a method ``let_go``. A hook of gradients also ends the
        mean over replicas that others have taken, for which see `take_replicas`.
        """
        before = self._installed().get(self._kind)
        if before is not None and before._hook is not hook:
            before._let_go()
        if self._kind == "reduce_scatter":
            for group in param_groups(self._module):
                replicas = getattr(group, "_tightwire", None)
                if replicas is not None:
                    replicas.give_back()
        self._installed()[self._kind], self._hook = self, hook
        self.set(hook)

    def remove(self) -> None:
        """Set PyTorch's own again, unless somebody has replaced the hook."""
        if self.current() is self._hook:
            self.set(self.own)
        if self.is_newest():
            self._let_go()
            del self._installed()[self._kind]

    def _let_go(self) -> None:
        let_go = getattr(self._hook, "let_go", None)
        if let_go is not None:
            let_go()

    def is_newest(self) -> bool:
        """Whether no hook was installed after this one's."""
        return self._installed().get(self._kind) is self


def _default(kind: Kind) -> Any:
    # Nothing public has them.
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as made

    return made.DefaultAllGather() if kind == "all_gather" else made.DefaultReduceScatter()


def _is_of_this_package(hook: Any) -> bool:
    package = __name__.partition(".")[0]
    return any(kind.__module__.partition(".")[0] == package for kind in type(hook).__mro__)


class Counting:
    """PyTorch's own communication of an FSDP module; after ``AGAIN`` calls `enough` is called."""

    def __init__(self, own: Any, enough: Callable[[], None]) -> None:
        self.own, self.allocate = own, own.allocate
        self._left, self._enough = AGAIN, enough

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As PyTorch's own."""
        self._left -= 1
        if not self._left:
            self._enough()
        return self.own(*args, **options)


class _Away(NamedTuple):
    """A hook that is away."""

    groups: frozenset[Any]
    communication: Communication
    hook: Any
    #: What is in its place.
    instead: Any


class AwayHooks:
    """Hooks of FSDP modules, some of which are away until they come back to look again.

    All ranks of a process group make the same calls in the same order. So each module that left
    counts its own calls: the first that has enough brings back all hooks that share a group with
    its own, between the same calls on all ranks. A module that is no longer called holds up nobody.

    Args:
        renew: Called with each process group whose hooks are back.
    """

    def __init__(self, renew: Callable[[Any], None]) -> None:
        self._renew = renew
        self._away: list[_Away] = []
        #: What takes hooks off, and of what, which belongs to a module: models do not live longer.
        self._removals: list[tuple[weakref.ref[Any], Callable[[Any], None]]] = []

    def install(self, communication: Communication, hook: Any) -> None:
        """Set a hook of a module, until `remove`."""
        communication.install(hook)
        self.on_remove(communication, Communication.remove)

    def on_remove(self, owner: Any, call: Callable[[Any], None]) -> None:
        """Have `remove` call something with `owner`, if that still exists."""
        self._removals.append((weakref.ref(owner), call))

    def remove(self) -> None:
        """Take all hooks off their modules."""
        self.close()
        removals, self._removals = self._removals, []
        for reference, call in removals:
            owner = reference()
            if owner is not None:
                call(owner)

    def put_away(self, groups: Iterable[Any], hooks: Sequence[tuple[Communication, Any]]) -> None:
        """Put PyTorch's own communication in the place of hooks of one module.

        Args:
            groups: Their process groups.
            hooks: What they are hooks of, and they themselves. Those that somebody has replaced do
                not count. Calls of the first are counted.
        """
        groups = frozenset(groups)
        there = [
            (communication, hook)
            for communication, hook in hooks
            if communication.current() is hook
        ]
        for number, (communication, hook) in enumerate(there):
            instead = communication.own
            if not number:
                instead = Counting(instead, functools.partial(self._look_again, groups))
            communication.set(instead)
            self._away.append(_Away(groups, communication, hook, instead))

    def _look_again(self, groups: frozenset[Any]) -> None:
        back = [one for one in self._away if one.groups & groups]
        self._bring_back(back)
        for group in frozenset[Any]().union(*(one.groups for one in back)):
            self._renew(group)

    def _bring_back(self, back: list[_Away]) -> None:
        self._away = [one for one in self._away if one not in back]
        for _, communication, hook, instead in back:
            # Newer hooks stay: those that are there, and those that are away, too.
            if communication.current() is instead and communication.is_newest():
                communication.set(hook)

    def close(self) -> None:
        """Have all hooks come back, as they are to refuse calls."""
        self._bring_back(self._away)


def remove(*hooks: Any) -> None:
    """Take hooks off their modules, and close them.

    Args:
        *hooks: Those of parameters and of gradients.
    """
    for hook in hooks:
        hook.away.remove()
    for hook in hooks:
        hook.close()


class _Replicas:
    """The mean over replicas of an FSDP module, which FSDP makes, or a hook.

    Args:
        group: What FSDP has of the module's parameters.
        alone: The mesh of shards alone, which is what FSDP is to know.
        hook: The hook.
    """

    def __init__(self, group: Any, alone: Any, hook: Any) -> None:
        self._group = group
        self._own = group.mesh_info, group._all_reduce_hook
        self._taken = alone, hook

    def take(self) -> None:
        """Have the hook make it."""
        self._change(self._own, self._taken)
        self._group._tightwire = self

    def give_back(self) -> None:
        """Have FSDP make it again, unless others have done so."""
        if getattr(self._group, "_tightwire", None) is self:
            self._change(self._taken, self._own)
            del self._group._tightwire

    def _change(self, old: tuple[Any, Any], new: tuple[Any, Any]) -> None:
        group = self._group
        group.mesh_info = new[0]
        # What the user has set in between stays.
        if group.post_forward_mesh_info == old[0]:
            group.post_forward_mesh_info = new[0]
        if group._all_reduce_hook is old[1]:
            group._all_reduce_hook = new[1]


def take_replicas(module: Any, away: AwayHooks, hook_of: Callable[[Any], Any]) -> None:
    """Have a hook make the mean over replicas of an FSDP module, if it has several.

    That ends when hooks are taken off, or others are installed. Those of the module's gradients are
    installed before this is called.

    Args:
        module: The FSDP module.
        away: What takes its hooks off.
        hook_of: Makes the hook, for the process group of the replicas.
    """
    # Nothing public has FSDP leave its sums over replicas to a hook.
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    for group in param_groups(module):
        info = group.mesh_info
        if isinstance(info, HSDPMeshInfo) and info.replicate_mesh_size > 1:
            alone = FSDPMeshInfo(info.mesh, shard_mesh_dim=info.shard_mesh_dim)
            replicas = _Replicas(group, alone, hook_of(info.replicate_process_group))
            replicas.take()
            away.on_remove(replicas, _Replicas.give_back)


class ModuleHooks:
    """The hooks of one FSDP module, which leave together when none of them is faster.

    Sums that may have to be made once more need gathers to tell steps apart, and gathers need sums
    to be judged before backward returns. A module that is gathered in several process groups stays:
    each group measures for itself, and some ranks of a large one would leave without the others.

    Args:
        away: Where they go.
        module: The FSDP module.
        hooks: Its hooks, of one kind or both, that of parameters first. `install` sets their
            attributes ``own``, which is PyTorch's communication, and ``together``, which is this.
            ``forget(group)`` is called before they leave.
    """

    def __init__(self, away: AwayHooks, module: Any, hooks: Mapping[Kind, Any]) -> None:
        self._away, self._module = away, module
        self._hooks = [(Communication(module, kind), hook) for kind, hook in hooks.items()]
        #: By kind and process group, whether PyTorch's own was faster last.
        self._native: dict[tuple[Kind, Any], bool] = {}

    def install(self) -> None:
        """Set the hooks."""
        for communication, hook in self._hooks:
            hook.own, hook.together = communication.own, self
            self._away.install(communication, hook)

    def found(self, kind: Kind, group: Any, native: bool) -> None:
        """Say whether PyTorch's own communication is the faster one.

        Args:
            kind: Of which hook.
            group: The process group of the call.
            native: Whether it is.
        """
        if len(gather_groups(self._module)) > 1:
            return
        self._native[kind, group] = native
        if not native or not all(self._native.values()):
            return
        kinds = {kind for kind, _ in self._native}
        if len(kinds) < len(self._hooks) and any(p.requires_grad for p in self._parameters()):
            return
        groups = {group for _, group in self._native}
        self._native.clear()
        for _, hook in self._hooks:
            for group in groups:
                hook.forget(group)
        self._away.put_away(groups, self._hooks)

    def _parameters(self) -> list[Any]:
        return [p.sharded_param for g in param_groups(self._module) for p in g.fsdp_params]


class NativeBuckets:
    """Buckets of a DistributedDataParallel model that are left to PyTorch's own hook.

    The model makes other buckets after its first step, so each counts its own calls. The first that
    has had ``AGAIN`` of them ends it for all, those that do not come any more included.

    Args:
        renew: Called when none is left to PyTorch any more.
    """

    def __init__(self, renew: Callable[[], None]) -> None:
        self._renew = renew
        #: By bucket: calls that are left to PyTorch.
        self._calls: dict[Hashable, int] = {}

    def add(self, bucket: Any) -> None:
        """Leave later calls of a bucket to PyTorch."""
        self._calls[_key(bucket)] = AGAIN

    def take(self, bucket: Any) -> bool:
        """Whether this call of a bucket is left to PyTorch. Counts it."""
        key = _key(bucket)
        if key not in self._calls:
            return False
        self._calls[key] -= 1
        if not self._calls[key]:
            self.clear()
            self._renew()
        return True

    def clear(self) -> None:
        """Leave nothing to PyTorch."""
        self._calls.clear()


def _key(bucket: Any) -> Hashable:
    return bucket.index(), bucket.buffer().numel(), bucket.buffer().dtype
