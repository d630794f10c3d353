"""`mx.summary.experimental`."""

from mirrax._src.train.summary import get_step as get_step
from mirrax._src.train.summary import set_step as set_step
