"""Pipelines between real processes, with tensor and data parallelism: also what they run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tightwire as tw
from processes import join, launch

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("PyTorch was built without gloo", allow_module_level=True)

from tightwire.adapters.training import ddp, pipeline  # noqa: E402
from tightwire.adapters.training import tensor_parallel as tp  # noqa: E402

WIDTH, INNER, TIME, BATCH = 64, 256, 10, 8
MICROBATCHES = 4
#: Steps of training, with codecs that lose nothing and with those of the papers.
EXACT, LOSSY = 2, 7
#: In seconds, what an error may take on a busy machine.
BOUND = 30.0


class Block(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A block of a transformer without its attention, tensor-parallel if asked."""

    def __init__(self, number: int, parallel: Any = None) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, INNER)
        self.down = torch.nn.Linear(INNER, WIDTH)
        if parallel is not None:
            self.up = tp.ColumnParallelLinear(self.up, parallel)
            self.down = tp.RowParallelLinear(self.down, parallel)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def blocks(numbers: Any, parallel: Any = None) -> Any:
    return torch.nn.Sequential(*(Block(number, parallel) for number in numbers))


def batch(step: int, part: int, parts: int) -> tuple[Any, Any]:
    """Inputs, and what a network of random weights makes of them."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(parts * BATCH, TIME, WIDTH, generator=generator)
    mix = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5)) / WIDTH**0.5
    mine = slice(part * BATCH, (part + 1) * BATCH)
    return x[mine], (x + torch.tanh(x @ mix))[mine]


def loss_of(y: Any, target: Any) -> Any:
    return (y - target).square().mean()


def alone(steps: int, parts: int, count: int) -> list[float]:
    """The losses of one process."""
    model = blocks(range(count))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for step in range(steps):
        x, target = whole(step, parts)
        loss = loss_of(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def whole(step: int, parts: int) -> tuple[Any, Any]:
    pieces = [batch(step, part, parts) for part in range(parts)]
    return torch.cat([x for x, _ in pieces]), torch.cat([y for _, y in pieces])


def three_dimensions(device: Any) -> dict[str, Any]:
    """Two replicas of two stages of two tensor-parallel ranks, exact and lossy."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    groups = {name: mesh[name].get_group() for name in ("dp", "pp", "tp")}
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    found: dict[str, Any] = {}
    for name, activations, boundaries, gradients, steps in (
        ("exact", "zipccl", None, "zipccl", EXACT),
        ("lossy", "taco", "tahquant", "sdp4bit", LOSSY),
    ):
        parallel = tp.connect(activations, activations, group=groups["tp"])
        boundary = pipeline.connect(boundaries, boundaries, group=groups["pp"])
        model = torch.nn.parallel.DistributedDataParallel(
            blocks([stage], parallel), process_group=groups["dp"]
        )
        hook = ddp.register(model, codec=gradients)
        part = boundary.stage(model, stage, 2, device)
        schedule = Schedule1F1B(part, MICROBATCHES, loss_fn=loss_of)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        losses = []
        for step in range(steps):
            x, target = batch(step, replica, 2)
            of_step: list[Any] = []
            if stage == 0:
                schedule.step(x)
            else:
                schedule.step(target=target, losses=of_step)
                losses.append(float(torch.stack(of_step).detach().mean()))
            optimizer.step()
            optimizer.zero_grad()
        counts = [(p.wire_bytes, p.raw_bytes) for p in (parallel, boundary, hook)]
        found[name] = [losses, [wire / raw for wire, raw in counts]]
        hook.close()
        parallel.close()
    return found


def schedules(device: Any) -> None:
    """Every schedule gives the gradients of one process, and with tahquant nearly those."""
    from torch.distributed import pipelining as torch_pipelining

    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, target = batch(0, 0, 1)
    for codec in (None, "tahquant"):
        boundary = pipeline.connect(codec, codec)
        for kind, stages in (
            ("ScheduleGPipe", [rank]),
            ("Schedule1F1B", [rank]),
            ("ScheduleInterleaved1F1B", [rank, rank + ranks]),
            ("ScheduleInterleavedZeroBubble", [rank, rank + ranks]),
            ("ScheduleZBVZeroBubble", [rank, 2 * ranks - 1 - rank]),
        ):
            count = ranks * len(stages)
            reference = blocks(range(count))
            loss_of(reference(x), target).backward()
            models = [blocks([number]) for number in stages]
            made = [
                boundary.stage(model, number, count, device)
                for model, number in zip(models, stages, strict=True)
            ]
            single = len(stages) == 1
            schedule = getattr(torch_pipelining, kind)(
                made[0] if single else made, MICROBATCHES, loss_fn=loss_of
            )
            for _ in range(2):
                for model in models:
                    model.zero_grad()
                is_last = count - 1 in stages
                schedule.step(*([x] if 0 in stages else []), target=target if is_last else None)
            for model, number in zip(models, stages, strict=True):
                for p, q in zip(model.parameters(), reference[number].parameters(), strict=True):
                    off = float((p.grad - q.grad).norm() / q.grad.norm())
                    assert off < (1e-5 if codec is None else 0.3), (kind, codec, off)
                    assert codec is None or number == count - 1 or off > 0
        share = boundary.wire_bytes / boundary.raw_bytes
        assert share == 1 if codec is None else share < 0.35
        boundaries(boundary)


def nodes(device: Any) -> dict[str, Any]:
    """Four stages in two nodes: only what the second and third tell each other is encoded."""
    from torch.distributed.pipelining import Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, target = batch(0, 0, 1)
    found = {}
    for name, codec, node in (("plain", None, None), ("flat", "mx", None), ("nodes", "mx", 2)):
        boundary = pipeline.connect(codec, codec, node=node)
        model = blocks([rank])
        stage = boundary.stage(model, rank, ranks, device)
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
        losses: list[Any] = []
        is_last = rank == ranks - 1
        schedule.step(
            *([] if rank else [x]),
            target=target if is_last else None,
            losses=losses if is_last else None,
        )
        ways = (boundary.forward, boundary.backward)
        found[name] = {
            "bytes": [[way.raw_bytes, way.wire_bytes] for way in ways],
            "gradient": torch.cat([p.grad.view(-1) for p in model.parameters()]).tolist(),
            "losses": [float(loss) for loss in losses],
        }
    with pytest.raises(ValueError, match=r"node is 3; rank \d is in a group of 4 ranks, forward"):
        pipeline.connect(node=3)
    with pytest.raises(tw.CollectiveError, match=r"ranks \[0\]: .*nodes of 2; ranks \[1, 2, 3\]"):
        pipeline.connect(node=1 + (rank == 0))
    return found


def boundaries(boundary: Any) -> None:
    """Ranks that send to each other, and autograd in loops of one's own."""
    rank, other = boundary.rank, 1 - boundary.rank
    x, out = torch.full((40, 64), float(rank)), torch.full((40, 64), 9.0)
    for _ in range(3):
        boundary.forward.sendrecv(x, other, out, other)
        assert torch.equal(out, torch.full((40, 64), float(other)))
    gaps = torch.ones(64, 40).t()
    with pytest.raises(ValueError, match="is not contiguous"):
        boundary.forward.sendrecv(x, other, gaps, other)
    with pytest.raises(ValueError, match="is not contiguous"):
        boundary.forward.irecv(gaps, other)
    if rank == 0:
        x = torch.ones(40, 64, requires_grad=True)
        tokens = [boundary.send(x * number, 1) for number in range(3)]
        sum(tokens).backward()
        assert torch.allclose(x.grad, torch.full_like(x, 5.0), rtol=0.02)
    else:
        ys = [boundary.receive((40, 64), torch.float32, 0) for _ in range(3)]
        # PyTorch goes backward from what was sent last.
        for number, y in reversed(list(enumerate(ys))):
            assert torch.allclose(y, torch.full_like(y, float(number)), rtol=0.02)
            (y * number).sum().backward()
    boundary.flush()


def numbers(device: Any) -> None:
    """Gradients go where they belong, whatever else is under way between the ranks."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    boundary = pipeline.connect("mx", "mx")
    sizes = [(40 + 8 * number, 64) for number in range(4)]
    for frozen in (False, True, False):
        # Both send to each other, in one group, and go backward in different orders.
        xs = [torch.ones(size, requires_grad=not frozen) for size in sizes]
        tokens = [boundary.send(x, other) for x in xs]
        ys = [boundary.receive(size, torch.float32, other) for size in sizes]
        # What goes without a header does not mix with what has one.
        plain = boundary.forward.isend(torch.full((40, 64), 3.0), other)
        for number in (1, 3, 0, 2) if rank else (2, 0, 1, 3):
            (ys[number] * 2.0 ** (number + 4 * rank)).sum().backward()
        out = torch.zeros(40, 64)
        boundary.forward.irecv(out, other).wait()
        plain.wait()
        assert torch.equal(out, torch.full_like(out, 3.0))
        if not frozen:
            sum(tokens[::-1] if rank else tokens).backward()
            for number, x in enumerate(xs):
                assert torch.equal(x.grad, torch.full_like(x, 2.0 ** (number + 4 * other)))
        boundary.flush()
    with pytest.raises(tw.CollectiveError, match=r"message 12 is .*\(80, 64\); receive was .*\(8,"):
        boundary.send(torch.ones(80, 64), other)
        boundary.receive((8, 64), torch.float32, other)
    boundary.flush()


def short(device: Any) -> None:
    """A message that does not fill the tensor is an error, with a codec and without."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    for codec, dtype in ((None, torch.float32), (None, torch.complex64), ("mx", torch.float32)):
        boundary = pipeline.connect(codec, codec)
        error = rf"rank {rank}: .*forward from rank {other}: fewer bytes arrived than {dtype} of "
        for size in (8, 0):
            with torch.inference_mode():
                x, out = torch.ones(size, 128, dtype=dtype), torch.zeros(8, 256, dtype=dtype)
            sent, received = boundary.forward.isend(x, other), boundary.forward.irecv(out, other)
            sent.wait()
            with pytest.raises(tw.CollectiveError, match=error + r"shape \(8, 256\)"):
                received.wait()
            with pytest.raises(tw.CollectiveError, match=error):
                boundary.forward.sendrecv(x, other, out, other)
        x, out = torch.ones(8, 256, dtype=dtype), torch.zeros(8, 256, dtype=dtype)
        boundary.forward.sendrecv(x, other, out, other)
        assert torch.equal(x, out)


def faults(device: Any) -> None:
    """Codecs that differ raise everywhere; a rank that is gone is named."""
    with pytest.raises(tw.CollectiveError, match=r"ranks differ: ranks \[0\]: .*ranks \[1\]: "):
        pipeline.connect("tahquant" if dist.get_rank() else "mx")
    boundary = pipeline.connect()
    if dist.get_rank():
        leave()
    start = time.monotonic()
    with pytest.raises(tw.CollectiveError, match=r"rank 0: recv #0 .*forward from rank 1: "):
        boundary.receive((100, 64), torch.float32, 1)
    assert time.monotonic() - start < BOUND
    leave()


def leave() -> None:
    """End the process at once: its peers are not waited for."""
    Path(sys.argv[-1]).write_text("null")
    os._exit(0)


@pytest.mark.slow
def test_three_dimensions_train_as_one_process(tmp_path: Path) -> None:
    results = launch(__file__, "three_dimensions", 8, tmp_path, warnings="default")
    for name, steps, tolerance in (("exact", EXACT, 1e-6), ("lossy", LOSSY, 0.03)):
        wanted = alone(steps, 2, 2)
        last_stages = [r[name][0] for rank, r in enumerate(results) if rank % 4 >= 2]
        assert all(not r[name][0] for rank, r in enumerate(results) if rank % 4 < 2)
        # Ranks of one tensor-parallel group have the same bits.
        assert last_stages[0] == last_stages[1]
        assert last_stages[2] == last_stages[3]
        for step in range(steps):
            mean = (last_stages[0][step] + last_stages[2][step]) / 2
            assert abs(mean - wanted[step]) < tolerance, (name, step, mean, wanted[step])
        assert name == "exact" or wanted[-1] < 0.25 * wanted[0]
    for result in results:
        parallel, boundary, hook = result["lossy"][1]
        assert parallel < 0.4
        assert boundary < 0.3
        assert hook < 0.2


@pytest.mark.slow
def test_schedules_of_pytorch(tmp_path: Path) -> None:
    launch(__file__, "schedules", 2, tmp_path, warnings="default")


@pytest.mark.slow
@pytest.mark.parametrize("task", ["numbers", "short"])
def test_messages_are_what_the_receiver_takes_them_for(task: str, tmp_path: Path) -> None:
    launch(__file__, task, 2, tmp_path, warnings="default")


@pytest.mark.slow
def test_stages_of_nodes(tmp_path: Path) -> None:
    found = launch(__file__, "nodes", 4, tmp_path, warnings="default")
    whole = BATCH * TIME * WIDTH * 4
    for rank, result in enumerate(found):
        sent = [[rank == 1, rank == 2], [rank < 3, rank > 0]]
        for name, ways in zip(("nodes", "flat"), sent, strict=True):
            for (raw, wire), is_sent in zip(result[name]["bytes"], ways, strict=True):
                assert raw == whole * is_sent
                assert 0.25 * raw <= wire < 0.4 * raw or not is_sent
        plain, flat, of_nodes = (
            torch.tensor(result[name]["gradient"]) for name in ("plain", "flat", "nodes")
        )
        off, more = ((x - plain).norm() / plain.norm() for x in (of_nodes, flat))
        assert 0 < off < more < 0.1
    assert found[3]["plain"]["losses"] != found[3]["nodes"]["losses"] != found[3]["flat"]["losses"]


@pytest.mark.slow
def test_a_stage_that_differs_or_is_gone_is_named(tmp_path: Path) -> None:
    launch(__file__, "faults", 2, tmp_path, warnings="default")


if __name__ == "__main__":
    given = (three_dimensions, schedules, numbers, short, nodes, faults)
    join({task.__name__: task for task in given}, sys.argv[1:])
