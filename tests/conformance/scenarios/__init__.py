"""The scenarios: small programs that run on TensorFlow and on mirrax alike.

Each is a function of `api`, a namespace that both libraries fill (tensorflow_api.py,
mirrax_api.py), and of `engine`, "eager" or "compiled", if that makes a difference. It
creates its own strategies and variables and returns any structure of values; what it
raises counts as its answer too. Its name is its id and says what it shows.

    @scenario("3.4")
    def sum_over_replicas(api, engine):
        strategy = api.mirrored(2)
        ...
        return strategy.reduce("SUM", value, axis=None)

Where mirrax departs from TensorFlow on purpose the decorator says why and what it gives
instead: `@scenario("12.1", differs="we name the bad device", expect=ValueError)`.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

ENGINES = ("eager", "compiled")


@dataclass(frozen=True)
class Scenario:
    """One program, and what is to be known about it."""

    fn: Callable[..., Any]
    rows: tuple[str, ...]
    case: tuple[str, ...] = ()
    differs: str | None = None
    expect: Any = None
    differs_in: tuple[str, ...] = ENGINES

    @property
    def name(self) -> str:
        return self.fn.__name__ + (f"[{'-'.join(self.case)}]" if self.case else "")

    @property
    def file(self) -> str:
        return self.fn.__module__.rpartition(".")[2]

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that it runs in; "any" if it never starts a replica function."""
        return (
            ENGINES if "engine" in inspect.signature(self.fn).parameters else ("any",)
        )

    def departs(self, engine: str) -> bool:
        return self.differs is not None and engine in (*self.differs_in, "any")

    def run(self, api: Any, engine: str) -> Any:
        return self.fn(api, *(() if engine == "any" else (engine,)), *self.case)


def scenario(
    *rows: str,
    cases: Iterable[tuple[str, ...]] = ((),),
    differs: str | None = None,
    expect: Any = None,
    differs_in: tuple[str, ...] = ENGINES,
) -> Callable[[Callable], Callable]:
    """Registers a scenario for these rows of the SPEC, once for each of `cases`.

    A case is a tuple of strings that the function gets as further arguments.
    """

    def register(fn: Callable) -> Callable:
        for case in cases:
            _scenarios.append(Scenario(fn, rows, case, differs, expect, differs_in))
        return fn

    return register


def replicas(*values: Any) -> Any:
    """What `expect=` writes for a value with one part for each replica."""
    return SimpleNamespace(values=values)


def all_scenarios() -> list[Scenario]:
    """All scenarios, in the order of their files and in each as they are written."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_scenarios, key=lambda each: each.file)


_scenarios: list[Scenario] = []
