"""Datasets: `mx.data`."""

from mirrax._src.input.structure import DatasetSpec as DatasetSpec
from mirrax._src.input.adapters import as_dataset as as_dataset
from mirrax._src.input.dataset import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from mirrax._src.input.dataset import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from mirrax._src.input.dataset import Dataset as Dataset
from mirrax._src.input.iterators import Iterator as Iterator
from mirrax._src.input.options import AUTOTUNE as AUTOTUNE
from mirrax._src.input.options import DistributeOptions as DistributeOptions
from mirrax._src.input.options import Options as Options
from mirrax._src.input.options import ThreadingOptions as ThreadingOptions
from mirrax._src.input.records import (
    FixedLengthRecordDataset as FixedLengthRecordDataset,
)
from mirrax._src.input.records import TextLineDataset as TextLineDataset
from mirrax._src.input.records import TFRecordDataset as TFRecordDataset
from mirrax.data import experimental as experimental
