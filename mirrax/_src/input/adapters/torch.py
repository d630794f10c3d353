"""PyTorch's `DataLoader`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes

from mirrax._src.input.adapters.external import External, Pass, with_tuples
from mirrax._src.input.dataset import Dataset
from mirrax._src.input.node import UNKNOWN
from mirrax._src.input.structure import PyTree


def adapt(source: Any) -> Dataset | None:
    """A `DataLoader` as ours.

    PyTorch draws the order of a pass from random generators: their states at its start are
    the pass's origin.
    """
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    if not isinstance(source, DataLoader):
        return None
    samplers = [source, source.sampler, getattr(source.batch_sampler, "sampler", None)]
    generators = {id(torch.default_generator): torch.default_generator}
    for each in samplers:
        generator = getattr(each, "generator", None)
        if generator is not None:
            generators[id(generator)] = generator

    def save() -> list[str]:
        return [g.get_state().numpy().tobytes().hex() for g in generators.values()]

    def load(states: list[str]) -> None:
        for generator, state in zip(generators.values(), states):
            generator.set_state(
                torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
            )

    def begin(origin: Any) -> Pass:
        if origin is not None:
            load(origin)
        origin = save()
        return Pass(iter(source), origin)

    @contextlib.contextmanager
    def looking() -> Iterator[None]:
        before = save()
        try:
            yield
        finally:
            load(before)

    def convert(batch: Any) -> PyTree:
        return with_tuples(_to_numpy(batch, torch))

    is_sized = not isinstance(source.dataset, IterableDataset)
    length = len(source) if is_sized else UNKNOWN
    return Dataset(External(begin, "torch.DataLoader", convert, length, look=looking))


def _to_numpy(value: Any, torch: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            return value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return value.detach().cpu().numpy()
    if isinstance(value, dict):
        return {key: _to_numpy(part, torch) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_to_numpy(part, torch) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else parts
    return value
