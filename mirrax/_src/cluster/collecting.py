"""Brings what all workers have to the first one, which writes checkpoints.

A few bytes go through the roster. More than that goes through the key-value store of JAX's
coordination service: the roster reads a message as one line, and has workers to watch.
"""

from __future__ import annotations

import secrets
from typing import Any

from mirrax._src.base import jax_compat
from mirrax._src.base.protocols import ClusterLike

_SMALL_BYTES = 64 * 1024
_PIECE_BYTES = 4 * 1024 * 1024
_SECONDS_TO_READ = 60


def collect_on_first(
    cluster: ClusterLike, worker: int, what: str, data: bytes
) -> list[bytes | None]:
    """All workers' `data`; on workers but the first, None for what they need not know.

    Every worker has to call it, as with `Cluster.agree`; number `worker` is this one.
    """
    is_first = worker == 0
    told = cluster.agree(what, None if is_first else _sent(data))
    return [
        data if k == worker else sent and _received(sent, is_wanted=is_first)
        for k, sent in enumerate(told)
    ]


def _sent(data: bytes) -> dict[str, Any]:
    """What the others are told: the bytes themselves, or where they are."""
    if len(data) <= _SMALL_BYTES:
        return {"hex": data.hex()}
    client = jax_compat.running_processes()[0]
    name = f"mirrax/{secrets.token_hex(8)}"
    starts = range(0, len(data), _PIECE_BYTES)
    keys = [f"{name}/{start}" for start in starts]
    for key, start in zip(keys, starts):
        client.key_value_set_bytes(key, data[start : start + _PIECE_BYTES])
    return {"keys": keys}


def _received(sent: dict[str, Any], is_wanted: bool) -> bytes | None:
    if "hex" in sent:
        return bytes.fromhex(sent["hex"])
    if not is_wanted:
        return None
    client, pieces = jax_compat.running_processes()[0], []
    for key in sent["keys"]:
        pieces.append(client.blocking_key_value_get_bytes(key, _SECONDS_TO_READ * 1000))
        client.key_value_delete(key)
    return b"".join(pieces)
