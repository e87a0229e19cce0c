"""The GPT of bench_training.py, and the models that train it on several ranks."""

# DDP compares the annotations of a hook, which must therefore not be strings.
import functools
import hashlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tightwire.adapters.training import fsdp, moe
from tightwire.adapters.training import tensor_parallel as tp

#: MiB of a bucket of DistributedDataParallel.
BUCKET_MIB = 256
#: Elements that are digested at a time.
_PIECE = 1 << 24


class Sizes(NamedTuple):
    """Sizes of a model and its batches; 870 million parameters by default."""

    layers: int = 16
    width: int = 2048
    heads: int = 16
    vocabulary: int = 32768
    tokens: int = 2048
    batch: int = 2
    experts: int = 8


class FeedForward(nn.Module):
    """The feed-forward part of a layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (..., width), in and out."""
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """A layer, with attention before the feed-forward part."""

    def __init__(self, sizes: Sizes, feed: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed = feed(width) if feed else FeedForward(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, tokens, width), in and out."""
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """A GPT without positions, whose weights are drawn from the current seed."""

    def __init__(self, sizes: Sizes, feed: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, feed) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, shape (batch, tokens, vocabulary)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Setting(NamedTuple):
    """What all models of a run have in common."""

    sizes: Sizes
    device: torch.device
    learning_rate: float

    def gpt(self, feed: Callable[[int], nn.Module] | None = None) -> GPT:
        """The model with its first weights, drawn from the same seed on all ranks.

        Args:
            feed: Makes the feed-forward part of a layer of this width; None: a dense one.
        """
        torch.manual_seed(0)
        with self.device:
            return GPT(self.sizes, feed)

    def tokens(self, step: int, rank: int) -> torch.Tensor:
        """The batch of a step: sums of random numbers, of which a model can learn a part."""
        generator = torch.Generator(self.device).manual_seed(step * 100 + rank)
        shape = self.sizes.batch, self.sizes.tokens + 1
        draws = torch.randint(0, 64, shape, device=self.device, generator=generator)
        return (draws.cumsum(1) * 7 % 997).clamp(max=self.sizes.vocabulary - 1)


class Model(NamedTuple):
    """A model that is trained on all ranks."""

    module: Any
    #: What has ``raw_bytes``, ``wire_bytes`` and ``close()``.
    hooks: tuple[Any, ...] = ()
    #: Whether all ranks get the same batch.
    same_batch: bool = False

    def close(self) -> None:
        """End the connections of its hooks."""
        for hook in self.hooks:
            hook.close()

    def sent(self) -> tuple[int, int] | None:
        """Bytes to other ranks so far, raw and on the wire; None without hooks."""
        if not self.hooks:
            return None
        return sum(h.raw_bytes for h in self.hooks), sum(h.wire_bytes for h in self.hooks)


Make = Callable[[Setting], Model]


@functools.cache
def _mesh(kind: str) -> Any:
    return init_device_mesh(kind, (dist.get_world_size(),))


def _compile_blocks(model: GPT) -> None:
    """Have each block compiled by itself, which spares the host most of its work in them."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, fullgraph=True)


def sharded(
    reduce: torch.dtype,
    compress: Callable[[Any], Iterable[Any]] | None = None,
    *,
    compiled: bool = False,
) -> Make:
    """FSDP2 with parameters in bfloat16 and gradients reduced in `reduce`."""

    def make(setting: Setting) -> Model:
        model = setting.gpt()
        if compiled:
            _compile_blocks(model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=_mesh(setting.device.type), mp_policy=policy)
        return Model(model, tuple(compress(model)) if compress else ())

    return make


def _replica(model: Any, setting: Setting) -> Any:
    where = [setting.device] if setting.device.type == "cuda" else None
    return DistributedDataParallel(
        model, device_ids=where, bucket_cap_mb=BUCKET_MIB, gradient_as_bucket_view=True
    )


def replicated(register: Callable[[Any], Any] | None = None, *, compiled: bool = False) -> Make:
    """DistributedDataParallel in bfloat16."""

    def make(setting: Setting) -> Model:
        model = setting.gpt().bfloat16()
        if compiled:
            _compile_blocks(model)
        replica = _replica(model, setting)
        return Model(replica, (register(replica),) if register else ())

    return make


def divided(connect: Callable[[torch.device], Any]) -> Make:
    """Tensor parallelism in bfloat16: two all-reduces of a layer forward, and two backward."""

    def make(setting: Setting) -> Model:
        model, parallel = setting.gpt().bfloat16(), connect(setting.device)
        for block in model.blocks:
            block.heads //= parallel.world_size
            block.qkv = tp.ColumnParallelLinear(block.qkv, parallel, parts=3)
            block.out = tp.RowParallelLinear(block.out, parallel)
            block.feed.up = tp.ColumnParallelLinear(block.feed.up, parallel)
            block.feed.down = tp.RowParallelLinear(block.feed.down, parallel)
        hooks = (parallel,) if isinstance(parallel, tp.TensorParallel) else ()
        return Model(model, hooks, same_batch=True)

    return make


class Experts(nn.Module):
    """A feed-forward part of experts, of which two compute as much for a token as a dense part."""

    def __init__(self, width: int, parallel: moe.ExpertParallel) -> None:
        super().__init__()
        self.router = nn.Linear(width, parallel.experts, bias=False)
        local = [FeedForward(width, 2 * width) for _ in parallel.local_experts]
        self.layer = moe.MixtureOfExperts(local, parallel, top_k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, tokens, width), in and out."""
        return self.layer(x, self.router(x))


def mixed(
    connect: Callable[[Setting], moe.ExpertParallel],
    register: Callable[[Any], Any] | None = None,
) -> Make:
    """Experts shared out to ranks; all else is data-parallel, in bfloat16."""

    def make(setting: Setting) -> Model:
        parallel = connect(setting)
        model = setting.gpt(lambda width: Experts(width, parallel)).bfloat16()
        own = [name for name, _ in model.named_parameters() if ".layer.experts." in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
        wrapped = _replica(model, setting)
        hooks = (parallel, register(wrapped)) if register else (parallel,)
        return Model(wrapped, hooks)

    return make


class _OwnGather:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> None:
        # The input may lie in the output.
        output_tensor.view(group.size(), -1).copy_(input_tensor.clone())


class _OwnScatter:
    allocate = _OwnGather.allocate

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def keep_parameters(model: Any) -> tuple[Any, ...]:
    """Have FSDP send nothing: its own shards take the place of the others'."""
    for _, module in fsdp.fsdp_modules(model):
        module.set_custom_all_gather(_OwnGather())
        module.set_custom_reduce_scatter(_OwnScatter())
    return ()


def _own_gradients(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradients = bucket.buffer()
    devices = [gradients.device] if gradients.is_cuda else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(gradients)
    return future


class Silence:
    """A hook that sends nothing."""

    raw_bytes = wire_bytes = 0

    def close(self) -> None:
        """Nothing to end."""


@functools.cache
def _alone_group() -> Any:
    return dist.new_subgroups(1)[0]


def experts(codec: str | None) -> Callable[[Setting], moe.ExpertParallel]:
    """Expert parallelism of all ranks, with a codec in both directions."""

    def connect(setting: Setting) -> moe.ExpertParallel:
        return moe.connect(setting.sizes.experts, codec, codec, device=setting.device)

    return connect


def own_experts(setting: Setting) -> moe.ExpertParallel:
    """Expert parallelism that sends nothing: each rank has its own tokens for its own experts."""
    count = setting.sizes.experts // dist.get_world_size()
    return moe.connect(count, None, None, group=_alone_group(), device=setting.device)


def keep_gradients(model: Any) -> Silence:
    """Have DistributedDataParallel send nothing: each rank keeps its own gradients."""
    model.register_comm_hook(None, _own_gradients)
    return Silence()


class Parallel:
    """Tensor parallelism by a function that sums a tensor over ranks in place."""

    def __init__(self, add_up: Callable[[torch.Tensor], Any]) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._add_up = add_up

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """Identity, whose gradient is summed."""
        return _Copy.apply(x, self._add_up)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, whose gradient is passed on."""
        return _Sum.apply(x, self._add_up)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, add_up: Any) -> torch.Tensor:
        ctx.add_up = add_up
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.contiguous().clone()
        ctx.add_up(total)
        return total, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, add_up: Any) -> torch.Tensor:
        total = x.contiguous().clone()
        add_up(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def natively(device: torch.device) -> Parallel:
    """Tensor parallelism by the network's own all-reduce."""
    return Parallel(dist.all_reduce)


def alone(device: torch.device) -> Parallel:
    """Tensor parallelism that sends nothing: each rank keeps its own terms."""
    return Parallel(lambda x: None)


class Trainer:
    """A model, its optimizer and the number of its steps.

    Args:
        make: Makes the model.
        setting: For all models.
    """

    def __init__(self, make: Make, setting: Setting) -> None:
        self.setting = setting
        self.model = make(setting)
        on_gpu = setting.device.type == "cuda"
        parameters = self.model.module.parameters()
        self._optimizer = torch.optim.AdamW(
            parameters, lr=setting.learning_rate, fused=True if on_gpu else None
        )
        self.steps = 0

    def batch(self) -> torch.Tensor:
        """The tokens of the next step."""
        rank = 0 if self.model.same_batch else dist.get_rank()
        return self.setting.tokens(self.steps, rank)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Make a step; the loss on this rank, on the device."""
        self.steps += 1
        found = self.model.module(tokens[:, :-1]).float()
        loss = functional.cross_entropy(found.flatten(0, 1), tokens[:, 1:].reshape(-1))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def digest(self) -> str:
        """A number of all bits of this rank's parameters, and of their places."""
        found = hashlib.sha256()
        for p in self.model.module.parameters():
            local = getattr(p, "_local_tensor", p).detach().reshape(-1)
            bits = local.view({2: torch.int16, 4: torch.int32}[local.element_size()])
            for piece in bits.split(_PIECE):
                odd = torch.arange(1, 2 * piece.numel(), 2, device=piece.device)
                found.update(str((piece.long() * odd).sum().item()).encode())
        return found.hexdigest()

    def close(self) -> None:
        """End the model's connections."""
        self.model.close()
