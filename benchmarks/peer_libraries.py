"""The libraries that `peers.py` compares, and the ways in which they are used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """A library's way to train: `rivals/loop_{library}.py`."""

    name: str
    library: str
    way: str = "plain"


MIRRAX = Peer("mirrax", "mirrax")
EACH, PACKED, GATHERED = (
    Peer("JAX, psum each", "jax", "each"),
    Peer("JAX, packed", "jax", "packed"),
    Peer("JAX, packed and gathered", "jax", "gathered"),
)
TF, TF_FEW, TF_LOOP = (
    Peer("TensorFlow", "tensorflow"),
    Peer("TensorFlow, few threads", "tensorflow", "few threads"),
    Peer("TensorFlow, loop compiled", "tensorflow", "loop"),
)
DDP, KERAS = Peer("PyTorch DDP", "torch"), Peer("Keras 3 on JAX", "keras")
DEFAULT = Peer("JAX, default threads", "jax", "default")
KERAS_DEFAULT = Peer("Keras 3, default threads", "keras", "default")
