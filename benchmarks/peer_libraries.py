"""The libraries that `peers.py` compares, and the ways in which they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# mirrax has glibc keep the memory that XLA frees; so do those who use XLA by hand.
KEEP_FREED = MappingProxyType(
    {
        "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
        "MALLOC_TOP_PAD_": str(48 * 2**20),
        "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    }
)


@dataclass(frozen=True)
class Peer:
    """A library's way to train: `rivals/loop_{library}.py`."""

    name: str
    library: str
    way: str = "plain"

    @property
    def settings(self) -> Mapping[str, str]:
        """Variables of the environment that make it faster."""
        is_as_installed = self.way == "default"
        on_xla = self.library in ("jax", "keras") and not is_as_installed
        return KEEP_FREED if on_xla else MappingProxyType({})


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
