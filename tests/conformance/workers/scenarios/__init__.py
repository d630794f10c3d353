"""The scenarios of many workers, written as those of one process.

    @scenario("8.4")
    def initial_values_are_the_first_workers(api):
        with api.multi_worker().scope():
            return api.copies(api.Variable(10.0 + api.worker))

Each worker runs the function, so none may call alone what all have to call together.
`clusters` says where it is run. Where mirrax departs from TensorFlow on purpose, `expect`
lists what each worker gives instead.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...scenarios import ENGINES, Scenario


@dataclass(frozen=True)
class WorkersScenario(Scenario):
    """A scenario, and the cluster that runs it."""

    cluster: str = "two"

    @property
    def name(self) -> str:
        where = "" if self.cluster == "two" else f" on {self.cluster}"
        return super().name + where


def scenario(
    *rows: str,
    cases: Iterable[tuple[str, ...]] = ((),),
    clusters: tuple[str, ...] = ("two",),
    differs: str | None = None,
    expect: Any = None,
    differs_in: tuple[str, ...] = ENGINES,
) -> Callable[[Callable], Callable]:
    """Registers a scenario, once for each of `cases` in each of `clusters`."""

    def register(fn: Callable) -> Callable:
        for case in cases:
            for cluster in clusters:
                why = (differs, expect, differs_in)
                _scenarios.append(WorkersScenario(fn, rows, case, *why, cluster))
        return fn

    return register


def all_scenarios() -> list[WorkersScenario]:
    """All scenarios, in the order of their files and in each as they are written."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_scenarios, key=lambda each: each.file)


_scenarios: list[WorkersScenario] = []
