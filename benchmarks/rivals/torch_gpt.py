"""The transformer of `gpt.py` in PyTorch: compiled, under DistributedDataParallel, one process.

`torch_gpt.py LAYERS WIDTH HEADS WORDS LENGTH BATCH`, with an interpreter that has PyTorch.
Float32 weights under autocast to bfloat16, fused AdamW. Prints {"ms": milliseconds}.
"""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import json
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.mix(self.first(x)).split(width, dim=-1)
        q, k, v = (h.view(rows, length, self.heads, -1).transpose(1, 2) for h in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(
        self, layers: int, width: int, heads: int, words: int, length: int
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last = nn.RMSNorm(width)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.words(tokens[:, :-1]) + self.places)
        logits = F.linear(self.last(x), self.words.weight)
        flat = logits.flatten(0, 1).float()
        return F.cross_entropy(flat, tokens[:, 1:].flatten())


def main() -> None:
    *sizes, batch = map(int, sys.argv[1:])
    words, length = sizes[3:]
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Gpt(*sizes).to(device)
    ids = [0] if on_gpu else None
    model = torch.compile(nn.parallel.DistributedDataParallel(model, device_ids=ids))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=on_gpu)
    tokens = torch.randint(words, (batch, length + 1), device=device)

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        loss.item()
        return (time.perf_counter() - start) / count

    run(5)
    count = max(1, round(1.0 / run(5)))
    median = statistics.median(run(count) for _ in range(10))
    print(json.dumps({"ms": median * 1e3}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
