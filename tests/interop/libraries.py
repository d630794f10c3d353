"""The libraries; a test that asks for one that is not there is skipped."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

# A folder; processes with it on their path find no TensorFlow.
NO_TENSORFLOW = str(Path(__file__).parent / "absent")


def without_tensorflow() -> dict[str, str]:
    """The environment for a process that finds no TensorFlow."""
    return os.environ | {"PYTHONPATH": NO_TENSORFLOW}


@functools.cache
def tensorflow() -> Any:
    """TensorFlow with four logical CPUs, for a `MirroredStrategy` of its own."""
    tf = pytest.importorskip("tensorflow")
    cpu = tf.config.list_physical_devices("CPU")[0]
    four = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, four)
    return tf


def grain() -> Any:
    return pytest.importorskip("grain.python")


def torch() -> Any:
    pytest.importorskip("torch.utils.data")
    return pytest.importorskip("torch")


def hugging_face() -> Any:
    return pytest.importorskip("datasets")


def keras() -> Any:
    return pytest.importorskip("keras")


def tensorboard() -> Any:
    return pytest.importorskip("tensorboard")


def safetensors() -> Any:
    return pytest.importorskip("safetensors")
