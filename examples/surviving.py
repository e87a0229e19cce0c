"""Training that goes on when a process is killed, and takes in a new one. On the CPU.

Run it with `python examples/surviving.py`. It starts three ranks, kills one in the middle of a
backward pass, and starts another one. The program holds the store by which ranks agree.
"""

import multiprocessing
import os
import signal
from itertools import groupby

import torch
import torch.distributed as dist

import tightwire as tw

torch.manual_seed(0)
INPUTS, LABELS = torch.randn(48, 64), torch.randint(8, (48,))


def train(rank: int | None, port: int, results: multiprocessing.Queue) -> None:
    """What a rank does; that of number None joins the others."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state = {"model": model, "optimizer": optimizer}
    if rank is None:
        group = tw.surviving.Group.join(store, state=state, silence=1)
    else:
        group = tw.surviving.Group(store, rank, 3, state=state, silence=1)
    sizes = []

    def gradients(comm: tw.Communicator) -> None:
        """Changes nothing but gradients: with a rank less it is called again."""
        optimizer.zero_grad()
        mine = slice(comm.rank, None, comm.world_size)  # each rank has its share of the batch
        torch.nn.functional.cross_entropy(model(INPUTS[mine]), LABELS[mine]).backward()
        group.average(model)

    with group:
        again = 0  # steps with all three, after the loss
        while again < 5:
            if (rank, group.steps) == (1, 5):
                kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
                model[1].register_full_backward_pre_hook(kill)
            group.step(gradients)
            optimizer.step()
            sizes.append(group.world_size)
            if group.world_size == 2:
                store.set("two ranks", "")
            again += group.generation > 0 and group.world_size == 3
    results.put((rank, sizes, [p.tolist() for p in model.parameters()]))


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = lambda rank: context.Process(target=train, args=(rank, store.port, results))  # noqa: E731
    ranks = [start(0), start(1), start(2)]
    for process in ranks:
        process.start()
    store.wait(["two ranks"])
    ranks[1].join()
    assert ranks[1].exitcode == -signal.SIGKILL
    ranks[1] = start(None)
    ranks[1].start()
    found = {rank: rest for rank, *rest in (results.get(timeout=120) for _ in range(3))}
    for process in ranks:
        process.join()
    sizes, weights = found[0]
    assert all(other == weights for _, other in found.values())
    took_part = ", then ".join(str(size) for size, _ in groupby(sizes))
    print(f"ranks in a step: {took_part}; all have the same weights")
