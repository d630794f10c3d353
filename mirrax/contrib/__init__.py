"""Programs of TensorFlow 1.11: `mx.contrib.distribute`."""

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
from mirrax.contrib import distribute as distribute
