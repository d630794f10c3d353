"""`rejection_resample`, made of other steps.

Where an element of class i has the share p_i in the data and shall have t_i, let r_i be
t_i / p_i. With probability min(r) the next element is taken as it comes. Else elements are
rejected until one is accepted, of class i with probability (r_i - min(r)) / (max(r) - min(r)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_SEEN_AT_FIRST = 10  # elements of each class that are supposed to have been seen
_ESTIMATED_AT_ONCE = 32


def resample(
    dataset: Any,
    class_func: Callable[..., Any],
    target_dist: Any,
    initial_dist: Any,
    seed: int | None,
) -> Any:
    """Pairs of a class and an element, by the distribution `target_dist`."""
    target = _checked(target_dist, "target_dist")

    def label(*element: Any) -> Any:
        return class_func(*element), (element[0] if len(element) == 1 else element)

    labelled = dataset.map(label)
    if initial_dist is not None:
        initial = _checked(initial_dist, "initial_dist")
        if initial.shape != target.shape:
            raise ValueError(
                "`target_dist` and `initial_dist` need a number for each class, got "
                f"{len(target)} and {len(initial)}."
            )
        rates = _rates(initial, target)
        if rates[-1] == 1:
            return labelled
        rates_of_all = dataset.from_tensors(rates).repeat()
    else:
        rates = None
        rates_of_all = _estimated_rates(dataset, labelled, target)
    draws = dataset.random(seed, rerandomize_each_iteration=True)
    accepted = (
        dataset.zip((draws, rates_of_all, labelled))
        .filter(lambda draw, rates, pair: _is_accepted(draw, rates, pair[0]))
        .map(lambda draw, rates, pair: pair)
    )
    if rates is not None and rates[-1] == 0:
        return accepted
    return dataset.sample_from_datasets(
        [labelled, accepted],
        weights=rates_of_all.map(lambda rates: np.stack([rates[-1], 1 - rates[-1]])),
        seed=seed,
        stop_on_empty_dataset=True,
        rerandomize_each_iteration=True,
    )


def _checked(distribution: Any, name: str) -> np.ndarray:
    found = np.asarray(distribution, np.float32)
    if found.ndim != 1 or not len(found) or (found < 0).any():
        raise ValueError(
            f"`{name}` must hold the proportion of each class, got {distribution!r}."
        )
    return found


def _rates(initial: np.ndarray, target: np.ndarray) -> np.ndarray:
    """How often each class is accepted; last how often an element is taken as it comes."""
    ratio = target / (initial + np.finfo(np.float32).tiny)
    least, most = ratio.min(), ratio.max()
    rates = (ratio - least) / max(most - least, np.finfo(np.float32).tiny)
    return np.append(rates, min(least, np.float32(1))).astype(np.float32)


def _is_accepted(draw: Any, rates: Any, kind: Any) -> Any:
    if not 0 <= kind < len(rates) - 1:
        raise ValueError(
            f"`class_func` returned {kind}, and `target_dist` has {len(rates) - 1} classes, "
            f"0 to {len(rates) - 2}."
        )
    return draw < rates[kind] * 2.0**32


def _estimated_rates(dataset: Any, labelled: Any, target: np.ndarray) -> Any:
    """The rates for each element, by the classes that were seen up to it."""

    def count(seen: np.ndarray, kinds: np.ndarray) -> Any:
        seen = seen + np.bincount(kinds, minlength=len(target)).astype(np.int64)
        rates = _rates((seen / seen.sum()).astype(np.float32), target)
        return seen, np.tile(rates, (len(kinds), 1))

    first = np.full(len(target), _SEEN_AT_FIRST, np.int64)
    classes = labelled.map(lambda kind, element: kind)
    return classes.batch(_ESTIMATED_AT_ONCE).scan(first, count).unbatch()
