"""Pipelines that are saved in one process and restored in another.

python -m interop.restarting < states.json     what is left of each, as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

import mirrax as mx
from interop import libraries
from interop.comparing import union


def _torch_generator(is_new: bool) -> Any:
    torch = libraries.torch()
    generator = torch.Generator().manual_seed(99 if is_new else 7)
    loader = torch.utils.data.DataLoader
    return loader(range(22), batch_size=4, shuffle=True, generator=generator)


def _torch_global(is_new: bool) -> Any:
    torch = libraries.torch()
    torch.manual_seed(99 if is_new else 7)
    return torch.utils.data.DataLoader(range(22), batch_size=4, shuffle=True)


def _torch_workers(is_new: bool) -> Any:
    torch = libraries.torch()
    torch.manual_seed(99 if is_new else 7)
    loader = torch.utils.data.DataLoader
    return loader(range(22), batch_size=4, shuffle=True, num_workers=2)


def _grain_map(is_new: bool) -> Any:
    return libraries.grain().MapDataset.range(22).shuffle(seed=3).batch(4)


def _grain_iter(is_new: bool) -> Any:
    rows = libraries.grain().MapDataset.range(11).shuffle(seed=3).repeat(2)
    return rows.to_iter_dataset().batch(4)


def _grain_loader(is_new: bool) -> Any:
    grain = libraries.grain()
    sampler = grain.IndexSampler(
        22, shard_options=grain.NoSharding(), shuffle=True, seed=3, num_epochs=1
    )
    return grain.DataLoader(
        data_source=np.arange(22), sampler=sampler, operations=[grain.Batch(4)]
    )


def _numbers() -> Any:
    return libraries.hugging_face().Dataset.from_dict({"x": list(range(22))})


def _hugging_face(is_new: bool) -> Any:
    return mx.data.as_dataset(_numbers().shuffle(seed=3)).batch(4)


def _hugging_face_iterable(is_new: bool) -> Any:
    stream = _numbers().to_iterable_dataset(num_shards=4)
    return mx.data.as_dataset(stream.shuffle(seed=3, buffer_size=5)).batch(4)


def _shuffled_by_mirrax(is_new: bool) -> Any:
    """Without a seed: the one that was drawn is part of the state."""
    rows = mx.data.as_dataset(_torch_generator(is_new)).unbatch()
    return rows.shuffle(9).batch(4)


PIPELINES = {
    "torch, generator": _torch_generator,
    "torch, global": _torch_global,
    "torch, workers": _torch_workers,
    "grain.MapDataset": _grain_map,
    "grain.IterDataset": _grain_iter,
    "grain.DataLoader": _grain_loader,
    "datasets.Dataset": _hugging_face,
    "datasets.IterableDataset": _hugging_face_iterable,
    "shuffled by mirrax": _shuffled_by_mirrax,
}


def start(name: str, strategy: Any, is_new: bool) -> Any:
    """A new pass over a pipeline; random numbers differ in a new process."""
    return iter(strategy.experimental_distribute_dataset(PIPELINES[name](is_new)))


def rest_of(iterator: Any, strategy: Any) -> list[list[int]]:
    """The batches that are left, as lists."""
    found = [union(strategy, step) for step in iterator]
    return [(b["x"] if isinstance(b, dict) else b).tolist() for b in found]


def main() -> None:
    mx.config.set_logical_device_configuration(cpu=2)
    strategy = mx.MirroredStrategy(["CPU:0", "CPU:1"])
    found: dict[str, Any] = {}
    for name, state in json.load(sys.stdin).items():
        try:
            iterator = start(name, strategy, is_new=True)
            iterator.set_state(state)
            found[name] = rest_of(iterator, strategy)
        except Exception as error:
            found[name] = repr(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
