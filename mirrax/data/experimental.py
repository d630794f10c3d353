"""`mx.data.experimental`."""

from mirrax._src.input.dataset import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from mirrax._src.input.dataset import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from mirrax._src.input.experimental import Counter as Counter
from mirrax._src.input.experimental import RandomDataset as RandomDataset
from mirrax._src.input.experimental import assert_cardinality as assert_cardinality
from mirrax._src.input.experimental import (
    bucket_by_sequence_length as bucket_by_sequence_length,
)
from mirrax._src.input.experimental import cardinality as cardinality
from mirrax._src.input.experimental import choose_from_datasets as choose_from_datasets
from mirrax._src.input.experimental import enumerate_dataset as enumerate_dataset
from mirrax._src.input.experimental import get_next_as_optional as get_next_as_optional
from mirrax._src.input.experimental import get_single_element as get_single_element
from mirrax._src.input.experimental import get_structure as get_structure
from mirrax._src.input.experimental import group_by_window as group_by_window
from mirrax._src.input.experimental import ignore_errors as ignore_errors
from mirrax._src.input.experimental import load as load
from mirrax._src.input.experimental import map_and_batch as map_and_batch
from mirrax._src.input.experimental import parallel_interleave as parallel_interleave
from mirrax._src.input.experimental import rejection_resample as rejection_resample
from mirrax._src.input.experimental import sample_from_datasets as sample_from_datasets
from mirrax._src.input.experimental import save as save
from mirrax._src.input.experimental import scan as scan
from mirrax._src.input.experimental import shuffle_and_repeat as shuffle_and_repeat
from mirrax._src.input.experimental import snapshot as snapshot
from mirrax._src.input.experimental import take_while as take_while
from mirrax._src.input.experimental import unbatch as unbatch
from mirrax._src.input.experimental import unique as unique
from mirrax._src.input.iterators import Optional as Optional
from mirrax._src.input.options import AUTOTUNE as AUTOTUNE
from mirrax._src.input.options import SHARD_HINT as SHARD_HINT
from mirrax._src.input.options import AutoShardPolicy as AutoShardPolicy
from mirrax._src.input.options import DistributeOptions as DistributeOptions
from mirrax._src.input.options import ThreadingOptions as ThreadingOptions
