"""A whole training loop with PyTorch's DistributedDataParallel over Gloo; see `looping.py`."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import torch
import torch._dynamo  # which DDP would import later, in 5 seconds
import torch.distributed as dist
from looping import MOMENTUM, RATE, Loop, run
from stepping import Steps
from torch import nn
from torch_workers import mlp


class Vectors(nn.Module):
    """Many vectors, drawn towards the rows."""

    def __init__(self, arrays: list[torch.Tensor]) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(arrays)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(((x - v) ** 2).sum(-1) for v in self.vectors)


def make(loop: Loop) -> Steps:
    torch.set_num_threads(loop.worker.threads)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{loop.worker.addresses[0]}",
        rank=loop.worker.number,
        world_size=loop.workers,
    )
    arrays = [torch.from_numpy(p.copy()) for p in loop.parameters]
    module = Vectors(arrays) if loop.is_variables else mlp(arrays)
    model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM, foreach=True)
    batches = loop.own_batches()

    def steps(count: int) -> float:
        for _ in range(count):
            x, y = (torch.from_numpy(part) for part in next(batches))
            optimizer.zero_grad(set_to_none=True)
            if loop.is_variables:
                losses = model(x)
            else:
                losses = nn.functional.cross_entropy(
                    model(x), y.long(), reduction="none"
                )
            # DDP averages the gradients, so each worker's share counts that much more.
            loss = losses.sum() / loop.batch * loop.workers
            loss.backward()
            optimizer.step()
            total = loss.detach() / loop.workers
            dist.all_reduce(total)
        return total.item() / loop.workers

    return steps


if __name__ == "__main__":
    run(make)
