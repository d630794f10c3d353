"""Is a step with the optimizer's state in parts as fast as with a copy on every device?

`speed`: the MLP 784-1024-1024-10 under Adam on 2 and 8 logical CPUs, with `shard_state=True`
and without, in turn; and the bytes of the state on a device, counted from its arrays.
`workers`: the same with two workers, one CPU each. `sizes`: a step of a transformer of 4
billion weights under AdamW for 8 devices, compiled from shapes alone; nothing is allocated,
XLA tells what the program would take on each device, with `jax.checkpoint` and without.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ahead import lower
from common import Ratio, Report, Step, cpu_devices, interleaved, parser
from models import MODELS
from steps import check_same_losses
from training import adam_state_step, distribute, optimizer_step
from workers import HERE, Workers
from workers import check_same_losses as check_same_losses_of_workers
from workers import measure as measure_workers

import mirrax as mx

REPLICAS, LAYERS, WIDTH, HEADS, WORDS, LENGTH = 8, 32, 3200, 32, 50304, 512
GIB = 2**30
# A step with the state in parts, against one with a copy on every device.
TARGET, TARGET_OF_WORKERS, TARGET_OF_BYTES = 1.0, 1.1, 1.05
STATES = {"mirrored": False, "in parts": True}


# Speed, and bytes on a device -----------------------------------------------------------


def compare_speed(num_replicas: int, report: Report) -> None:
    """Times steps in both styles, and counts what their states take."""
    strategy = mx.MirroredStrategy([f"CPU:{i}" for i in range(num_replicas)])
    model = MODELS["large"]
    x, y = distribute(strategy, model.make_batch())
    variants: dict[str, Step] = {}
    held = {}
    for name, shard_state in STATES.items():
        step, _, optimizer = optimizer_step(
            strategy, model, optax.adam(1e-3), shard_state
        )
        variants[f"variables, {name}"] = lambda step=step: strategy.run(step, (x, y))
        variants[f"state, {name}"] = adam_state_step(strategy, model, shard_state)
        held[name] = bytes_on_device(optimizer)
    check_same_losses(variants)
    rounds, seconds = (3, 0.05) if report.options.quick else (60, 0.25)
    figures = interleaved(variants, rounds, seconds)
    rows = []
    for style in ("variables", "state"):
        whole, parts = (figures[f"{style}, {name}"] for name in STATES)
        ratio = Ratio.of(parts, whole)
        rows.append([style, *map(float, map(np.median, (whole, parts))), str(ratio)])
        name = f"{num_replicas} replicas, {style}, in parts / mirrored"
        report.check(name, ratio.median, TARGET)
    title = f"{model.name}, Adam, batch {model.batch_size}, {num_replicas} replicas"
    report.table(title, ("style", "mirrored, ms", "in parts, ms", "ratio"), rows)
    shown = [[name, f"{size / 2**20:.3f} MiB"] for name, size in held.items()]
    report.table("its state on a device", ("state", "bytes"), shown)
    share = held["in parts"] / held["mirrored"] * num_replicas
    report.check(f"{num_replicas} replicas, bytes / (1/n)", share, TARGET_OF_BYTES)


def bytes_on_device(optimizer: mx.train.Optimizer) -> int:
    """What the fullest device holds of the state, counted from its arrays."""
    held: Counter[Any] = Counter()
    for variable in optimizer.variables:
        for shard in variable.in_one_array()[0].addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())


def compare_workers(report: Report) -> None:
    """The same with two workers, of one CPU each."""
    model = MODELS["large"]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        script = [str(HERE / "jax_workers.py"), "adam"]
        workers = Workers(2, sys.executable, script, folder)
        stack.callback(workers.close)
        ways = dict.fromkeys(STATES, workers)
        check_same_losses_of_workers("large", ways)
        figures = measure_workers("large", ways, report.options.quick)
    ratio = Ratio.of(figures["in parts"], figures["mirrored"])
    row = ["variables", *(float(np.median(figures[n])) for n in STATES), str(ratio)]
    header = ("style", "mirrored, ms", "in parts, ms", "ratio")
    title = f"{model.name}, Adam, batch {model.batch_size}, 2 workers"
    report.table(title, header, [row])
    name = "2 workers, in parts / mirrored"
    report.check(name, ratio.median, TARGET_OF_WORKERS)


# 4 billion weights ------------------------------------------------------------------------


def shape_of_params() -> dict[str, jax.ShapeDtypeStruct]:
    shapes = {
        "words": (WORDS, WIDTH),
        "attention": (LAYERS, WIDTH, 4 * WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
        "norms": (LAYERS, 2, WIDTH),
    }
    return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}


def loss_of(params: Any, tokens: jax.Array, is_checkpointed: bool) -> jax.Array:
    """The mean cross-entropy of the next word."""

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        rows, length, _ = x.shape
        mixed = norm(x, layer["norms"][0]) @ layer["attention"]
        *heads, last = jnp.split(mixed, 4, axis=-1)
        q, k, v = (h.reshape(rows, length, HEADS, -1) for h in heads)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.reshape(x.shape) * jax.nn.silu(last)
        hidden = jax.nn.gelu(norm(x, layer["norms"][1]) @ layer["up"])
        return x + hidden @ layer["down"], None

    block = jax.checkpoint(block) if is_checkpointed else block
    layers = {k: v for k, v in params.items() if k != "words"}
    x, _ = jax.lax.scan(block, params["words"][tokens[:, :-1]], layers)
    logits = x @ params["words"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses) / REPLICAS


def compile_step(shard_state: bool, is_checkpointed: bool) -> Any:
    """The compiled step of one strategy of 8 replicas, in functional style."""
    strategy = mx.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
    optimizer = mx.train.Optimizer(optax.adamw(3e-4), shard_state=shard_state)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens, is_checkpointed)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = shape_of_params()
    state = jax.eval_shape(optimizer.begin, params)
    tokens = jax.ShapeDtypeStruct((REPLICAS, LENGTH + 1), jnp.int32)
    return lower(strategy, step, params, state, tokens, shard_state).compile()


def compare_sizes(report: Report) -> None:
    """What XLA says that each device needs for a large model."""
    weights = sum(math.prod(x.shape) for x in shape_of_params().values())
    rows = []
    for name, is_checkpointed in (
        ("mirrored", True),
        ("in parts", True),
        ("in parts", False),
    ):
        compiled = compile_step(STATES[name], is_checkpointed)
        sizes: Any = compiled.memory_analysis()
        found = re.findall(
            r" (all-reduce|reduce-scatter|all-gather)\(", compiled.as_text()
        )
        gib = [sizes.argument_size_in_bytes / GIB, sizes.temp_size_in_bytes / GIB]
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(found).items())
        shown = "yes" if is_checkpointed else "no"
        rows.append([name, shown, *(f"{each:.2f}" for each in gib), kinds])
    title = f"{weights / 1e9:.2f} billion weights, {REPLICAS} devices, GiB on each"
    header = ("state", "jax.checkpoint", "arguments", "temporary", "collectives")
    report.table(title, header, rows)


PARTS = ("speed", "workers", "sizes")


def main() -> None:
    options = parser(__doc__, REPLICAS)
    options.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    given = options.parse_args()
    if strange := set(given.parts) - set(PARTS):
        options.error(f"no such part: {', '.join(sorted(strange))}")
    wanted = given.parts or PARTS
    report = Report("sharded_state", given)
    if "workers" in wanted:
        compare_workers(report)
    devices = cpu_devices(max(REPLICAS, given.replicas))
    if "speed" in wanted:
        for num_replicas in sorted({2, given.replicas}):
            compare_speed(num_replicas, report)
    if "sizes" in wanted:
        compare_sizes(report)
    report.finish(devices)


if __name__ == "__main__":
    main()
