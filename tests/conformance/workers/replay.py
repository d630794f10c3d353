"""Asks mirrax: what a worker process of a `WorkerPool` does for a scenario."""

import json
import os
import traceback
from functools import cache
from typing import Any

from helpers.programs import compile_quickly

from .. import mirrax_api
from ..describe import describe
from .clusters import CLUSTERS, WorkerApi
from .scenarios import WorkersScenario, all_scenarios

compile_quickly()  # in workers, which import this


def answer(name: str, engine: str) -> tuple[Any, str]:
    """This worker's answer to `file.scenario`; where it comes from, if it is an error."""
    scenario = _scenarios()[name]
    cluster = CLUSTERS[scenario.cluster]
    worker, addresses = _place_in_pool()
    config = cluster.config(worker, addresses)
    os.environ.pop("TF_CONFIG", None)
    if config is not None:
        os.environ["TF_CONFIG"] = config
    api = WorkerApi(mirrax_api, worker, len(cluster.tasks))
    result = mirrax_api.attempt(lambda: scenario.run(api, engine))
    is_error = isinstance(result, Exception)
    where = "".join(traceback.format_exception(result)) if is_error else ""
    return describe(result), where


@cache
def _place_in_pool() -> tuple[int, list[str]]:
    """This worker's number and all addresses, before another `TF_CONFIG` is set."""
    config = json.loads(os.environ["TF_CONFIG"])
    return config["task"]["index"], config["cluster"]["worker"]


@cache
def _scenarios() -> dict[str, WorkersScenario]:
    return {f"{each.file}.{each.name}": each for each in all_scenarios()}
