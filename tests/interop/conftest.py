"""What the libraries need before they are imported, and the warnings that are theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

for _name, _value in {
    "KERAS_BACKEND": "jax",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}.items():
    os.environ.setdefault(_name, _value)

_NOT_OURS = [
    # PyTorch forks its workers, beside the threads of JAX; they never use JAX.
    r"ignore:os\.fork\(\) was called:RuntimeWarning",
    # Keras' variables as NumPy's arrays.
    r"ignore:__array__ implementation doesn't accept:DeprecationWarning",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for line in _NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(line))
