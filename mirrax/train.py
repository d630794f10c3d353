"""Training: `mx.train`."""

from mirrax._src.train.checkpoint import Checkpoint as Checkpoint
from mirrax._src.train.checkpoint import CheckpointOptions as CheckpointOptions
from mirrax._src.train.checkpoint import latest_checkpoint as latest_checkpoint
from mirrax._src.train.checkpoint import load_checkpoint as load_checkpoint
from mirrax._src.train.explaining import StatePlan as StatePlan
from mirrax._src.train.manager import CheckpointManager as CheckpointManager
from mirrax._src.train.moving_average import (
    ExponentialMovingAverage as ExponentialMovingAverage,
)
from mirrax._src.train.optimizer import Optimizer as Optimizer
from mirrax._src.train.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from mirrax._src.train.preemption import TerminationConfig as TerminationConfig
from mirrax._src.train.progress import Progress as Progress
from mirrax._src.train.restoring import RestoreStatus as RestoreStatus
from mirrax._src.train.tensorflow_checkpoint import (
    load_tensorflow_checkpoint as load_tensorflow_checkpoint,
)
