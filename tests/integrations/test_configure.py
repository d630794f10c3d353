"""`configure` of a compat.v1 strategy: a session's settings, and no clusters."""

from __future__ import annotations

import pytest

import mirrax as mx

v1 = mx.compat.v1
pytestmark = pytest.mark.filterwarnings("ignore:.*configure")  # an old name, said once


@pytest.fixture
def mirrored():
    return v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def test_it_sets_what_the_strategy_needs(mirrored):
    config = v1.ConfigProto()
    assert mirrored.configure(session_config=config) is None
    assert config.isolate_session_state is True
    assert mirrored.configure() is None


def test_one_device_needs_nothing():
    config = v1.ConfigProto()
    strategy = v1.distribute.OneDeviceStrategy("CPU:0")
    strategy.configure(config)
    assert config.isolate_session_state is False


@pytest.mark.parametrize(
    "given",
    [
        {"cluster_spec": {"worker": ["a:1", "b:2"]}},
        {"task_type": "worker"},
        {"task_id": 0},
    ],
)
def test_one_program_does_not_drive_several_workers(mirrored, given):
    with pytest.raises(ValueError, match="in-graph") as error:
        mirrored.configure(**given)
    assert "TF_CONFIG" in str(error.value)


def test_the_settings_must_be_settings(mirrored):
    with pytest.raises(AttributeError, match="isolate_session_state"):
        mirrored.configure(object())
