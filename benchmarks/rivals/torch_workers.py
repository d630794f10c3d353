"""Training steps of workers under PyTorch's DistributedDataParallel over Gloo.

Run by `workers.py`, once for each worker, with an interpreter that has PyTorch:
`torch_workers.py NAME WORKER ADDRESSES FOLDER`. See `stepping.py`.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from stepping import RATE, Problem, Steps, Ways, Worker, answer
from torch import nn


def main() -> None:
    name, *arguments = sys.argv[1:]
    answer(lambda worker: join(worker, name), arguments)


def join(worker: Worker, name: str) -> Ways:
    torch.set_num_threads(worker.threads)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{worker.addresses[0]}",
        rank=worker.number,
        world_size=len(worker.addresses),
    )
    count = len(worker.addresses)
    return {name: lambda model: make(worker.load(model), count)}


def make(problem: Problem, workers: int) -> Steps:
    arrays = [torch.from_numpy(array) for array in problem.parameters]
    module = cnn(arrays) if problem.is_cnn else mlp(arrays)
    model = nn.parallel.DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    x, y = torch.from_numpy(problem.x), torch.from_numpy(problem.y).long()
    if problem.is_cnn:
        x = x.permute(0, 3, 1, 2).contiguous()

    def steps(count: int) -> float:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        return loss.item() / workers  # of means over equal parts

    return steps


def mlp(arrays: list[torch.Tensor]) -> nn.Module:
    layers: list[nn.Module] = []
    for w, b in zip(arrays[::2], arrays[1::2]):
        layers += [with_values(nn.Linear(*w.shape), w.T, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(arrays: list[torch.Tensor]) -> nn.Module:
    """As in `models.py`, with channels before rows and columns."""
    k1, b1, k2, b2, w, b = arrays
    w = w.reshape(14, 14, 32, 10).permute(2, 0, 1, 3).reshape(-1, 10)
    return nn.Sequential(
        with_values(nn.Conv2d(1, 16, 3, padding=1), k1.permute(3, 2, 0, 1), b1),
        nn.ReLU(),
        nn.ZeroPad2d((0, 1, 0, 1)),  # where "SAME" pads for a stride of 2
        with_values(nn.Conv2d(16, 32, 3, stride=2), k2.permute(3, 2, 0, 1), b2),
        nn.ReLU(),
        nn.Flatten(),
        with_values(nn.Linear(*w.shape), w.T, b),
    )


def with_values(
    layer: nn.Linear | nn.Conv2d, weight: torch.Tensor, bias: torch.Tensor
) -> nn.Module:
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer


if __name__ == "__main__":
    main()
