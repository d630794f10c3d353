"""Records and what is in them: `mx.io`."""

from mirrax._src.input.examples import FixedLenFeature as FixedLenFeature
from mirrax._src.input.examples import (
    FixedLenSequenceFeature as FixedLenSequenceFeature,
)
from mirrax._src.input.examples import Ragged as Ragged
from mirrax._src.input.examples import RaggedFeature as RaggedFeature
from mirrax._src.input.examples import VarLenFeature as VarLenFeature
from mirrax._src.input.examples import decode_example as decode_example
from mirrax._src.input.examples import encode_example as encode_example
from mirrax._src.input.examples import parse_example as parse_example
from mirrax._src.input.examples import parse_single_example as parse_single_example
from mirrax._src.input.writing import TFRecordOptions as TFRecordOptions
from mirrax._src.input.writing import TFRecordWriter as TFRecordWriter
