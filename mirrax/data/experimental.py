"""`mx.data.experimental`."""

from mirrax._src.input.iterators import Optional as Optional
from mirrax._src.input.options import AUTOTUNE as AUTOTUNE
from mirrax._src.input.options import SHARD_HINT as SHARD_HINT
from mirrax._src.input.options import AutoShardPolicy as AutoShardPolicy
from mirrax._src.input.options import DistributeOptions as DistributeOptions
