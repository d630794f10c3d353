"""Do all-reduces of gradients run while a GPU still computes the backward pass?

A step of the transformer of `gpt.py` is compiled for eight GPUs, of which none but one has to be here,
and the order of its instructions is read: how many collectives there are, and how many
matrix products lie between the start and the end of each. It takes a machine with a GPU, for
XLA's compiler; nothing runs.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ahead import lower
from common import Report, parser
from gpt import Gpt, make_transformation
from jax.experimental import topologies

import mirrax as mx

MIB = 2**20
FLAGS: dict[str, dict[str, Any]] = {
    "as XLA has it": {},
    "no latency-hiding scheduler": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "latency-hiding scheduler": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "and combined up to 1 MiB": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_reduce_combine_threshold_bytes": MIB,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": MIB,
        "xla_gpu_all_gather_combine_threshold_bytes": MIB,
    },
    "and combined up to 1 GiB": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_reduce_combine_threshold_bytes": 1024 * MIB,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 1024 * MIB,
        "xla_gpu_all_gather_combine_threshold_bytes": 1024 * MIB,
    },
}
COLLECTIVES = "all-reduce|reduce-scatter|all-gather"
BYTES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1}


def main() -> None:
    options = parser(__doc__, replicas=8)
    options.add_argument("--batch", type=int, default=16, help="rows of each replica")
    given = options.parse_args()
    report = Report("overlap", given)
    gpt = Gpt(2, 64, 4, 256, 32) if given.quick else Gpt()
    devices = topologies.get_topology_desc(
        "gpus", "cuda", topology=f"1x1x{given.replicas}"
    ).devices
    strategy = mx.MirroredStrategy(devices)
    for shard_state in (False, True):
        lowered = lower_step(strategy, gpt, given.batch, shard_state)
        rows = [
            [name, *describe(lowered.compile(compiler_options=flags).as_text() or "")]
            for name, flags in FLAGS.items()
        ]
        kind = "state in parts" if shard_state else "state mirrored"
        report.table(
            f"{kind}, {given.replicas} x {devices[0].device_kind}", HEADER, rows
        )
    report.finish(devices)


def lower_step(
    strategy: mx.distribute.Strategy, gpt: Gpt, batch: int, shard_state: bool
) -> jax.stages.Lowered:
    optimizer = mx.train.Optimizer(make_transformation(), shard_state=shard_state)
    count = strategy.num_replicas_in_sync

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return gpt.loss(params, tokens) / count

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, gpt.make_parameters()))
    state = jax.eval_shape(optimizer.begin, params)
    tokens = jax.ShapeDtypeStruct((count * batch, gpt.length + 1), jnp.int32)
    return lower(strategy, step, params, state, tokens, shard_state)


HEADER = ("flags", "collectives", "MiB", "hidden, % of bytes", "products beside them")


def describe(text: str) -> list[object]:
    """What one program's order of instructions says."""
    entry = text[text.index("ENTRY ") :].splitlines()
    started: dict[str, tuple[int, int]] = {}
    products = found = hidden = total = beside = 0
    for line in entry:
        products += is_product(line)
        start = re.search(rf"%(\S+) = (.*?) ({COLLECTIVES})-start\(", line)
        if start:
            started[start[1]] = products, size_of(start[2]) // 2  # operands and results
        alone = re.search(rf"= (.*?) (?:{COLLECTIVES})\(", line)
        if alone:
            found, total = found + 1, total + size_of(alone[1])
        done = re.search(rf"(?:{COLLECTIVES})-done\(%(\S+?)\)", line)
        if done:
            before, size = started[done[1]]
            found, total = found + 1, total + size
            beside += products - before
            hidden += size if products > before else 0
    share = f"{hidden / total:.0%}" if total else ""
    return [found, f"{total / MIB:.0f}", share, beside]


def is_product(line: str) -> bool:
    """Whether an instruction multiplies matrices, as XLA writes that for GPUs."""
    return "__cublas" in line or "gemm_fusion" in line or "__cudnn$fmha" in line


def size_of(shapes: str) -> int:
    """The bytes of all arrays in the text of a type."""
    total = 0
    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        count = 1
        for dim in filter(None, dims.split(",")):
            count *= int(dim)
        total += BYTES.get(dtype, 0) * count
    return total


if __name__ == "__main__":
    main()
