"""Strategies as TensorFlow 1.11 had them, with towers: `mx.contrib.distribute`."""

from mirrax._src.integrations.contrib.cross_tower_ops import (
    AllReduceCrossTowerOps as AllReduceCrossTowerOps,
)
from mirrax._src.integrations.contrib.cross_tower_ops import (
    CrossTowerOps as CrossTowerOps,
)
from mirrax._src.integrations.contrib.cross_tower_ops import (
    ReductionToOneDeviceCrossTowerOps as ReductionToOneDeviceCrossTowerOps,
)
from mirrax._src.integrations.contrib.datasets import TowerDataset as TowerDataset
from mirrax._src.integrations.contrib.mirrored import (
    MirroredStrategy as MirroredStrategy,
)
from mirrax._src.integrations.contrib.mirrored import (
    OneDeviceStrategy as OneDeviceStrategy,
)
from mirrax._src.integrations.contrib.multi_step import (
    MultiStepContext as MultiStepContext,
)
from mirrax._src.integrations.contrib.strategy import (
    DistributionStrategy as DistributionStrategy,
)
from mirrax._src.integrations.contrib.strategy import MapOutput as MapOutput
from mirrax._src.integrations.contrib.towers import TowerContext as TowerContext
from mirrax._src.integrations.contrib.towers import (
    get_cross_tower_context as get_cross_tower_context,
)
from mirrax._src.integrations.contrib.towers import (
    get_distribution_strategy as get_distribution_strategy,
)
from mirrax._src.integrations.contrib.towers import (
    get_loss_reduction as get_loss_reduction,
)
from mirrax._src.integrations.contrib.towers import (
    get_tower_context as get_tower_context,
)
from mirrax._src.integrations.contrib.towers import (
    has_distribution_strategy as has_distribution_strategy,
)
from mirrax._src.integrations.contrib.towers import (
    require_tower_context as require_tower_context,
)
