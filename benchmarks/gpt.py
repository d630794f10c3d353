"""Does a transformer of 190 million weights train on a GPU as fast as by hand, or in PyTorch?

Float32 weights, computed in bfloat16, AdamW behind a clip by the global norm, one replica, batches of
1,024 tokens each. By hand: one `jax.jit` with donated weights and state. `--torch PYTHON`
names an interpreter with PyTorch, for the same under `torch.compile` and DistributedDataParallel;
it runs first, while JAX does not hold the GPU's memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import (
    Devices,
    Ratio,
    Report,
    Step,
    find_devices,
    interleaved,
    parser,
    run_python,
)
from steps import check_same_losses

import mirrax as mx

RIVAL = Path(__file__).parent / "rivals" / "torch_gpt.py"
MOST = 1.01
RATE, CLIP = 3e-4, 1.0


@dataclass(frozen=True)
class Gpt:
    """A causal transformer with an output layer tied to the embedding."""

    layers: int = 11
    width: int = 1024
    heads: int = 16
    words: int = 50304
    length: int = 1024

    def make_parameters(self) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        d = self.width

        def random(*shape: int) -> np.ndarray:
            return (0.02 * rng.standard_normal(shape, "f")).astype("f")

        blocks = [
            {
                "mix": random(d, 3 * d),
                "out": random(d, d),
                "up": random(d, 4 * d),
                "down": random(4 * d, d),
                "norms": np.ones((2, d), "f"),
            }
            for _ in range(self.layers)
        ]
        words, places = random(self.words, d), random(self.length, d)
        last = np.ones(d, "f")
        return {"words": words, "places": places, "blocks": blocks, "last": last}

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """The mean cross-entropy of the next token."""
        on_gpu = jax.default_backend() == "gpu"
        small = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

        def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
            wide = x.astype(jnp.float32)
            mean = jnp.mean(wide * wide, -1, keepdims=True)
            return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale

        x = small["words"][tokens[:, :-1]] + small["places"]
        rows = len(x)
        for block in small["blocks"]:
            mixed = norm(x, block["norms"][0]) @ block["mix"]
            q, k, v = (
                h.reshape(rows, self.length, self.heads, -1)
                for h in jnp.split(mixed, 3, axis=-1)
            )
            attended = jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation="cudnn" if on_gpu else None
            )
            x = x + attended.reshape(x.shape) @ block["out"]
            hidden = jax.nn.gelu(norm(x, block["norms"][1]) @ block["up"])
            x = x + hidden @ block["down"]
        logits = norm(x, small["last"]) @ small["words"].T
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), tokens[:, 1:]
        ).mean()


def make_transformation() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE))


def by_hand(gpt: Gpt, tokens: np.ndarray, devices: Devices) -> Step:
    transformation = make_transformation()

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(gpt.loss)(params, tokens)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params = jax.device_put(gpt.make_parameters(), devices[0])
    kept = params, transformation.init(params)
    batch = jax.device_put(tokens, devices[0])

    def run() -> jax.Array:
        nonlocal kept
        *new, loss = compiled(*kept, batch)
        kept = tuple(new)
        return loss

    return run


def with_variables(
    gpt: Gpt, tokens: np.ndarray, devices: Devices, shard_state: bool = False
) -> Step:
    strategy = mx.MirroredStrategy(devices)
    with strategy.scope():
        arrays, tree = jax.tree.flatten(gpt.make_parameters())
        variables = [mx.Variable(array) for array in arrays]
        optimizer = mx.train.Optimizer(make_transformation(), shard_state=shard_state)

    @mx.function
    def step(tokens: jax.Array) -> jax.Array:
        def loss_fn() -> jax.Array:
            read = [variable.read_value() for variable in variables]
            return gpt.loss(tree.unflatten(read), tokens)

        loss, gradients = mx.value_and_grad(loss_fn, variables)()
        optimizer.apply_gradients(zip(gradients, variables))
        return loss

    batch = jax.device_put(tokens, devices[0])
    return lambda: strategy.run(step, args=(batch,))


def with_state(gpt: Gpt, tokens: np.ndarray, devices: Devices) -> Step:
    strategy = mx.MirroredStrategy(devices)
    optimizer = mx.train.Optimizer(make_transformation())
    with strategy.scope():
        params = strategy.replicate(gpt.make_parameters())
        kept = params, optimizer.init(params)

    @mx.function(donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(gpt.loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    batch = jax.device_put(tokens, devices[0])

    def run() -> Any:
        nonlocal kept
        *new, loss = strategy.run(step, args=(*kept, batch))
        kept = tuple(new)
        return loss

    return run


def main() -> None:
    options = parser(__doc__, replicas=1)
    options.add_argument("--batches", nargs="+", type=int, default=[16, 32])
    options.add_argument("--torch", metavar="PYTHON")
    given = options.parse_args()
    report = Report("gpt", given)
    gpt = Gpt(2, 64, 4, 256, 32) if given.quick else Gpt()
    theirs = {
        batch: run_python(_arguments(gpt, batch), given.torch)["ms"]
        for batch in (given.batches if given.torch else ())
    }
    devices = find_devices(1)
    weights = sum(p.size for p in jax.tree.leaves(gpt.make_parameters()))
    for batch in given.batches:
        shape = batch, gpt.length + 1
        tokens = np.random.default_rng(1).integers(gpt.words, size=shape, dtype="i4")
        place = gpt, tokens, devices
        variants = {
            "by hand": by_hand(*place),
            "mirrax variables": with_variables(*place),
            "mirrax state": with_state(*place),
            "mirrax, shard_state=True": with_variables(*place, shard_state=True),
        }
        check_same_losses(variants)
        figures = interleaved(variants, *((2, 0.02) if given.quick else (15, 1.0)))
        rows: list[list[object]] = []
        for name, values in figures.items():
            ratio = Ratio.of(values, figures["by hand"])
            rows.append([name, float(np.median(values)), str(ratio)])
            if name != "by hand":
                report.check(f"batch {batch}, {name} / by hand", ratio.median, MOST)
        if batch in theirs:
            ratio = theirs[batch] / float(np.median(figures["by hand"]))
            rows.append(["PyTorch, compiled, DDP", theirs[batch], f"{ratio:.3f}"])
        title = f"{weights / 1e6:.0f} million weights, {batch} x {gpt.length} tokens"
        report.table(title, ("step", "ms", "/ by hand"), rows)
        del variants
    report.finish(devices)


def _arguments(gpt: Gpt, batch: int) -> list[str]:
    sizes = (gpt.layers, gpt.width, gpt.heads, gpt.words, gpt.length, batch)
    return [str(RIVAL), *map(str, sizes)]


if __name__ == "__main__":
    main()
