"""The part of `api` that needs no array library: it is the same for both."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np


def attempt(fn: Callable[[], Any]) -> Any:
    """What `fn()` gives, or the exception that it raises."""
    try:
        return fn()
    except Exception as error:
        return error


def fails(fn: Callable[[], Any]) -> bool:
    """Whether `fn()` raises, where the array library chooses the class."""
    return isinstance(attempt(fn), Exception)


def complaint(fn: Callable[[], Any], *words: str) -> Any:
    """What `fn()` raises, and which of `words` the message has; else what it gives."""
    found = attempt(fn)
    if not isinstance(found, Exception):
        return found
    message = str(found).lower()
    return [found, [word for word in words if word.lower() in message]]


def copies(variable: Any) -> list[np.ndarray]:
    """A variable's value on each replica, as it is now."""
    components = getattr(variable, "values", (variable,))
    return [np.array(to_numpy(component)) for component in components]


def to_numpy(value: Any) -> np.ndarray:
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def class_name(value: Any) -> str:
    return type(value).__name__


def brief(value: Any, *, wide: bool = True) -> Any:
    """A structure of arrays in few words: `{"int64[2]": [1, 2]}` for each.

    Without `wide`, 64-bit types count as 32-bit ones, because JAX has no others.
    """
    if isinstance(value, dict):
        return {str(key): brief(part, wide=wide) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [brief(part, wide=wide) for part in value]
    if value is None or isinstance(value, BaseException):
        return value
    array = to_numpy(value)
    dtype = "string" if array.dtype.kind in "SUO" else array.dtype.name
    shape = ",".join(map(str, array.shape))
    dtype = dtype if wide else dtype.replace("64", "32")
    return {f"{dtype}[{shape}]": _plain(array.tolist())}


def elements(dataset: Any, limit: int = 100) -> list:
    """The elements of a dataset, with their exact types."""
    return [brief(element) for element in islice(dataset.as_numpy_iterator(), limit)]


def numbers(dataset: Any, limit: int = 100) -> list:
    """The elements of a dataset as plain numbers, strings and lists."""
    return [plain(element) for element in islice(dataset.as_numpy_iterator(), limit)]


def plain(value: Any) -> Any:
    """A structure of arrays as plain numbers, strings and lists."""
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return None if value is None else _plain(to_numpy(value).tolist())


def spec(value: Any) -> Any:
    """An element_spec, or that of a dataset: `[shape, dtype]` for each component."""
    value = getattr(value, "element_spec", value)
    if isinstance(value, dict):
        return {str(key): spec(part) for key, part in value.items()}
    parts = getattr(value, "values", getattr(value, "_value_specs", None))
    if isinstance(parts, tuple):
        return {"replicas": [spec(part) for part in parts]}
    if isinstance(value, list | tuple):
        return [spec(part) for part in value]
    if not hasattr(value, "shape"):
        return class_name(value)
    unknown = value.shape is None or getattr(value.shape, "rank", 0) is None
    shape = "unknown" if unknown else [d if d is None else int(d) for d in value.shape]
    dtype = value.dtype if hasattr(value.dtype, "name") else np.dtype(value.dtype)
    return [shape, "string" if dtype.name in ("object", "bytes") else dtype.name]


@contextmanager
def directory() -> Iterator[str]:
    """A directory that is there for as long as the block runs."""
    with TemporaryDirectory() as path:
        yield path


def relative(path: Any, directory: str) -> Any:
    """A path, or each of a list of them, from `directory` on."""
    if isinstance(path, list | tuple):
        return [relative(each, directory) for each in path]
    is_path = isinstance(path, str | os.PathLike)
    return os.path.relpath(path, directory) if is_path else path


def checkpoints_in(directory: str) -> list[str]:
    """The checkpoints on disk: TensorFlow has two files for each, mirrax a directory."""
    names = [
        each.name if each.is_dir() else each.stem
        for each in Path(directory).iterdir()
        if each.is_dir() or each.suffix == ".index"
    ]
    return sorted(names)


def local_results(strategy: Any, value: Any) -> list:
    """What each replica has of a value."""
    parts = strategy.experimental_local_results(value)
    return [brief(part, wide=False) for part in parts]


def steps(strategy: Any, distributed: Any, limit: int = 20) -> list:
    """What each replica gets at each step of a distributed dataset."""
    batches = islice(iter(distributed), limit)
    return [local_results(strategy, batch) for batch in batches]


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value


def parameters(fn: Callable[..., Any]) -> dict[str, Any]:
    """What a method can be given: its parameters, and their defaults in words."""
    return {
        name: "required" if each.default is each.empty else str(each.default)
        for name, each in signature(fn).parameters.items()
        if name != "self"
    }


def loops_of(engine: str) -> AbstractContextManager[None]:
    """How the block runs loops of steps: eagerly or compiled, where there is a choice."""
    return nullcontext()
