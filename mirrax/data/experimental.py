"""`mx.data.experimental`."""

from mirrax._src.input.dataset import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from mirrax._src.input.dataset import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from mirrax._src.input.iterators import Optional as Optional
from mirrax._src.input.options import AUTOTUNE as AUTOTUNE
from mirrax._src.input.options import SHARD_HINT as SHARD_HINT
from mirrax._src.input.options import AutoShardPolicy as AutoShardPolicy
from mirrax._src.input.options import DistributeOptions as DistributeOptions
from mirrax._src.input.options import ThreadingOptions as ThreadingOptions
