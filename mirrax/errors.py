"""Errors that TensorFlow has and Python has not: `mx.errors`."""

from mirrax._src.base.errors import DataLossError as DataLossError
from mirrax._src.base.errors import OutOfRangeError as OutOfRangeError
from mirrax._src.base.errors import UnavailableError as UnavailableError
