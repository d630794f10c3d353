"""A whole training loop with PyTorch's DistributedDataParallel over Gloo; see `looping.py`."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

from pathlib import Path

import torch
import torch._dynamo  # which DDP would import later, in 5 seconds
import torch.distributed as dist
from looping import ADAM_RATE, MOMENTUM, RATE, Loop, Training, run
from torch import nn
from torch_workers import mlp


class Vectors(nn.Module):
    """Many vectors, drawn towards the rows."""

    def __init__(self, arrays: list[torch.Tensor]) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(arrays)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(((x - v) ** 2).sum(-1) for v in self.vectors)


class Transformer(nn.Module):
    """The transformer of `models.py`."""

    HEADS = 4

    def __init__(self, arrays: list[torch.Tensor]) -> None:
        super().__init__()
        self.arrays = nn.ParameterList(arrays)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedding, positions, *layers, head = self.arrays
        length, width = positions.shape
        x = nn.functional.embedding(tokens, embedding) + positions
        for i in range(0, len(layers), 10):
            g1, b1, w_qkv, w_out, g2, b2, w1, c1, w2, c2 = layers[i : i + 10]
            qkv = self._normalize(x, g1, b1) @ w_qkv
            qkv = qkv.view(-1, length, 3, self.HEADS, width // self.HEADS)
            mixed = nn.functional.scaled_dot_product_attention(
                *qkv.permute(2, 0, 3, 1, 4), is_causal=True
            )
            x = x + mixed.transpose(1, 2).reshape(-1, length, width) @ w_out
            hidden = self._normalize(x, g2, b2) @ w1 + c1
            x = x + nn.functional.gelu(hidden, approximate="tanh") @ w2 + c2
        return x @ head

    def _normalize(
        self, x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], 1 + gain, bias, 1e-6)


def make(loop: Loop) -> Training:
    torch.set_num_threads(loop.worker.threads)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{loop.worker.addresses[0]}",
        rank=loop.worker.number,
        world_size=loop.workers,
    )
    arrays = [torch.from_numpy(p.copy()) for p in loop.parameters]
    kinds = {"variables": Vectors, "transformer": Transformer}
    module = kinds.get(loop.model, mlp)(arrays)
    model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = (
        torch.optim.Adam(model.parameters(), ADAM_RATE, fused=True)
        if loop.is_transformer
        else torch.optim.SGD(model.parameters(), RATE, MOMENTUM, fused=True)
    )
    batches = loop.own_batches()

    def steps(count: int) -> float:
        for _ in range(count):
            x, y = (torch.from_numpy(part) for part in next(batches))
            optimizer.zero_grad(set_to_none=True)
            if loop.is_variables:
                losses = model(x)
            else:
                logits = model(x).movedim(-1, 1)  # classes before places
                losses = nn.functional.cross_entropy(logits, y.long(), reduction="none")
            if loop.is_transformer:
                losses = losses.mean(-1)
            # DDP averages the gradients, so each worker's share counts that much more.
            loss = losses.sum() / loop.batch * loop.workers
            loss.backward()
            optimizer.step()
            total = loss.detach() / loop.workers
            dist.all_reduce(total)
        return total.item() / loop.workers

    def save(path: Path) -> None:
        if loop.worker.number == 0:
            torch.save([module.state_dict(), optimizer.state_dict()], path)
        dist.barrier()

    def restore(path: Path) -> None:
        weights, slots = torch.load(path)
        module.load_state_dict(weights)
        optimizer.load_state_dict(slots)

    return Training(steps, save, restore)


if __name__ == "__main__":
    run(make)
