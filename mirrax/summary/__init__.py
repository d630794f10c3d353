"""What TensorBoard shows: `mx.summary`."""

from mirrax._src.train.summary import SummaryWriter as SummaryWriter
from mirrax._src.train.summary import create_file_writer as create_file_writer
from mirrax._src.train.summary import flush as flush
from mirrax._src.train.summary import histogram as histogram
from mirrax._src.train.summary import image as image
from mirrax._src.train.summary import record_if as record_if
from mirrax._src.train.summary import scalar as scalar
from mirrax._src.train.summary import should_record_summaries as should_record_summaries
from mirrax._src.train.summary import text as text
from mirrax.summary import experimental as experimental
