"""What happens when a checkpoint is restored, and what the caller is told of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from mirrax._src.base.errors import warn_user
from mirrax._src.base.hiding import all_brief, hides
from mirrax._src.train import storage
from mirrax._src.train.saving import Item, put_global
from mirrax._src.train.storage import Contents
from mirrax._src.train.writer import wait_for_saves


class Matching:
    """A checkpoint that is being restored: what was found in it so far.

    Attributes:
        contents: What is in it.
        missing: The names of what is here and not in the checkpoint.
        unused: The names of what is in the checkpoint and not here.
    """

    def __init__(self, checkpoint: Any, contents: Contents) -> None:
        self._checkpoint = checkpoint
        self.contents = contents
        self.unused: set[str] = set(contents.names)
        self.missing: set[str] = set()

    def restore_more(self, only: str | None = None) -> None:
        """Restores what is there now: everything, or one attribute."""
        contents = self.contents
        part = self._checkpoint.collect()
        items = {n: i for n, i in part.items.items() if _is_part(n, only)}
        matched = {n: item for n, item in items.items() if n in self.unused}
        self.missing |= items.keys() - matched.keys()
        unbuilt = {
            prefix: optimizer
            for prefix, optimizer in part.optimizers.items()
            if not hasattr(optimizer, "state") and _is_part(prefix, only)
        }
        later = {
            name: prefix
            for prefix in unbuilt
            for name in self.unused
            if name.startswith(prefix) and name in contents.arrays
        }
        if only is not None and not matched and not later:
            return
        if only is not None and open_checkpoint(contents.path) != contents:
            raise ValueError(
                f"{only!r} cannot be restored any more: {contents.path} was replaced by "
                "another checkpoint since. Restore again."
            )
        _check(matched, contents)
        arrays = storage.read_arrays(
            contents, [n for n in (*matched, *later) if n in contents.arrays]
        )
        # States first: they may still be refused, before anything else has changed.
        _put_values(
            {n: i for n, i in matched.items() if not i.is_array}, contents.values
        )
        _put_arrays({n: i for n, i in matched.items() if i.is_array}, arrays)
        part.finish()
        for prefix, optimizer in unbuilt.items():
            names = [name for name, p in later.items() if p == prefix]
            saved = {name.removeprefix(prefix): arrays[name] for name in names}
            optimizer.restore_later(saved, part.places)
        self.unused -= matched.keys() | later.keys()


@all_brief
@hides("warn_if_partial")
class RestoreStatus:
    """What came of a restore; returned by `Checkpoint.restore`."""

    __module__ = "mirrax.train"

    def __init__(self, matching: Matching | None) -> None:
        self._matching = matching
        self._is_seen = False

    @property
    def missing(self) -> list[str]:
        """The names of what is here and not in the checkpoint."""
        return sorted(self._matching.missing) if self._matching else []

    @property
    def unused(self) -> list[str]:
        """The names of what is in the checkpoint and not here."""
        return sorted(self._matching.unused) if self._matching else []

    def assert_consumed(self) -> RestoreStatus:
        """Raises an AssertionError unless here and in the checkpoint is exactly the same."""
        self._assert(not self.missing and not self.unused)
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Raises an AssertionError if something that is here was not in the checkpoint."""
        self._assert(not self.missing)
        return self

    def assert_nontrivial_match(self) -> RestoreStatus:
        """Raises an AssertionError if nothing was restored."""
        everything = self._matching.contents.names if self._matching else []
        self._assert(not everything or len(self.unused) < len(everything))
        return self

    def expect_partial(self) -> RestoreStatus:
        """Says that it is meant that not everything was restored."""
        self._is_seen = True
        return self

    def __repr__(self) -> str:
        path = self._matching.contents.path if self._matching else None
        rest = f", missing={self.missing}, unused={self.unused}"
        return f"RestoreStatus({str(path)!r}{rest})" if path else "RestoreStatus(None)"

    def _assert(self, holds: bool) -> None:
        self._is_seen = True
        if self._matching is None:
            raise AssertionError("Nothing was restored: the path was None.")
        if not holds:
            raise AssertionError(self._describe())

    def _describe(self) -> str:
        assert self._matching is not None
        lines = [f"The checkpoint {self._matching.contents.path} was restored in part."]
        if self.missing:
            lines.append(
                f"Here, but not in the checkpoint (unchanged): {_list(self.missing)}."
            )
        if self.unused:
            lines.append(f"In the checkpoint, but not here: {_list(self.unused)}.")
        return "\n".join(lines)

    def __del__(self) -> None:
        self.warn_if_partial()

    def warn_if_partial(self) -> None:
        """Warns of what was not restored, unless a method was called that looks at it."""
        if not self._is_seen and (self.missing or self.unused):
            self._is_seen = True
            warn_user(
                f"{self._describe()}\nCall `expect_partial()` on what `restore` returns if "
                "that is meant."
            )


def _is_part(name: str, only: str | None) -> bool:
    """Whether something belongs to an attribute; None means to any."""
    return only is None or name == only or name.startswith(f"{only}/")


def open_checkpoint(path: str | os.PathLike[str]) -> Contents:
    """What is in a checkpoint that is about to be read."""
    wait_for_saves()
    storage.recover(Path(path).parent)
    contents = storage.read_contents(Path(path))
    storage.check_sizes(contents)
    return contents


def _check(matched: Mapping[str, Item], contents: Contents) -> None:
    wrong = []
    for name, item in matched.items():
        saved = contents.arrays.get(name, contents.values.get(name))
        if (name in contents.arrays) != item.is_array:
            wrong.append(f"{name}: an array on one side, a value or state on the other")
        elif problem := item.check(saved):
            wrong.append(f"{name}: {problem}")
    if wrong:
        lines = "\n  ".join(wrong)
        raise ValueError(
            f"The checkpoint {contents.path} does not fit. Nothing has been restored.\n  "
            f"{lines}"
        )


def _put_values(items: Mapping[str, Item], values: Mapping[str, Any]) -> None:
    """Restores numbers and states; if one is refused, those before it are put back."""
    undo: list[tuple[Item, Any]] = []
    for name, item in items.items():
        before = item.take()
        try:
            item.put(values[name])
        except Exception as error:
            for done, value in reversed(undo):
                done.put(value)
            error.add_note(f"Raised while {name!r} was restored; nothing has changed.")
            raise
        undo.append((item, before))


def _put_arrays(items: Mapping[str, Item], arrays: Mapping[str, Any]) -> None:
    """Restores arrays; those that go to the same devices travel together."""
    placed = dict(arrays)
    for sharding in {item.sharding for item in items.values()} - {None}:
        names = [n for n, item in items.items() if item.sharding == sharding]
        if sharding.is_fully_addressable:
            together = jax.device_put([arrays[n] for n in names], sharding)
        else:
            together = [put_global(arrays[n], sharding) for n in names]
        placed.update(zip(names, together))
    for name, item in items.items():
        item.put(placed[name])


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(names[:20]) + more
