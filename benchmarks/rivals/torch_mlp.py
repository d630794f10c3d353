"""An MLP's training step under PyTorch's DistributedDataParallel.

Run by `steps.py`, with an interpreter that has PyTorch:
`torch_mlp.py 784-128-128-10 BATCH REPLICAS ROUNDS`. One process for each replica, over
NCCL on GPUs and over Gloo on the loopback elsewhere. Prints {"ms": milliseconds}.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    sizes = [int(size) for size in sys.argv[1].split("-")]
    batch, replicas, rounds = map(int, sys.argv[2:])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (sizes, batch, replicas, rounds, port)
    torch.multiprocessing.spawn(train, arguments, nprocs=replicas)


def train(
    rank: int, sizes: list[int], batch: int, replicas: int, rounds: int, port: int
) -> None:
    """What one replica does; the first one measures and prints."""
    has_gpu = torch.cuda.device_count() >= replicas
    device = torch.device("cuda", rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // replicas))
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=replicas,
    )
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n, m in zip(sizes, sizes[1:]):
        layers += [nn.Linear(n, m), nn.ReLU()]
    ids = [rank] if has_gpu else None
    model = nn.Sequential(*layers[:-1]).to(device)
    model = nn.parallel.DistributedDataParallel(model, device_ids=ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(batch // replicas, sizes[0], device=device)
    y = torch.randint(sizes[-1], (batch // replicas,), device=device)

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        loss.item()
        return (time.perf_counter() - start) / count

    run(5)
    count = torch.tensor([max(1, round(0.2 / run(5)))], device=device)
    dist.broadcast(count, 0)  # replicas have to do equally many steps
    median = statistics.median(run(int(count)) for _ in range(rounds))
    if rank == 0:
        print(json.dumps({"ms": median * 1e3}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
