"""Records, lines and examples in files that TensorFlow wrote (7.1)."""

import tempfile
from pathlib import Path

import numpy as np

from . import scenario

FILES = Path(__file__).parents[1] / "files"
COMPRESSION = {".gz": "GZIP", ".zlib": "ZLIB"}


def _file(name):
    return str(FILES / name)


def _look(api, dataset):
    return {
        "spec": api.spec(dataset),
        "cardinality": int(dataset.cardinality()),
        "elements": api.numbers(dataset),
    }


def _read(api, dataset):
    """The elements up to the error, and the error."""
    elements = []
    iterator = dataset.as_numpy_iterator()
    while True:
        try:
            elements.append(api.plain(next(iterator)))
        except StopIteration:
            return elements
        except Exception as error:
            return [*elements, error]


# TFRecord.


@scenario(
    "7.1",
    cases=[
        ("plain.tfrecord",),
        ("gzip.tfrecord.gz",),
        ("zlib.tfrecord.zlib",),
        ("empty.tfrecord",),
        ("empty.tfrecord.gz",),
        ("one.tfrecord",),
        ("large.tfrecord",),
    ],
)
def tfrecords(api, name):
    compression = COMPRESSION.get(Path(name).suffix)
    dataset = api.data.TFRecordDataset(_file(name), compression_type=compression)
    return _look(api, dataset)


@scenario("7.1")
def tfrecord_arguments(api):
    Dataset = api.data.TFRecordDataset
    parts = [_file(f"part-{i}.tfrecord") for i in range(3)]
    return {
        "list": api.numbers(Dataset(parts)),
        "other_order": api.numbers(Dataset(parts[::-1])),
        "path": api.numbers(Dataset(FILES / "one.tfrecord")),
        "dataset": api.numbers(Dataset(api.data.Dataset.from_tensor_slices(parts[:2]))),
        "no_files": api.numbers(Dataset(np.array([], dtype=object).astype("S1"))),
        "buffer": api.numbers(Dataset(parts, buffer_size=3)),
        "no_buffer": api.numbers(Dataset(parts, buffer_size=0)),
        "empty_compression": api.numbers(Dataset(parts[0], compression_type="")),
        "with_empty_file": api.numbers(
            Dataset([parts[0], _file("empty.tfrecord"), parts[0]])
        ),
        "numpy": api.numbers(Dataset(np.array(parts[:1]))),
        "twice": api.numbers(Dataset(parts[0]).repeat(2)),
    }


@scenario("7.1")
def tfrecord_parallel_reads(api):
    parts = [_file(f"part-{i}.tfrecord") for i in range(3)]
    dataset = api.data.TFRecordDataset(parts, num_parallel_reads=2)
    return _look(api, dataset)


@scenario("7.1")
def tfrecord_interleave(api):
    parts = [_file(f"part-{i}.tfrecord") for i in range(3)]
    files = api.data.Dataset.from_tensor_slices(parts)
    return [
        api.numbers(files.interleave(api.data.TFRecordDataset, cycle_length=2)),
        api.numbers(files.flat_map(api.data.TFRecordDataset)),
        api.numbers(
            files.interleave(
                lambda name: api.data.TFRecordDataset(name).take(2),
                cycle_length=3,
                num_parallel_calls=2,
            )
        ),
    ]


CUT = "a file that ends inside the length of a record is damaged, too"


class DataLossError(Exception):
    """What `expect=` writes for the class of that name."""


@scenario(
    "7.1",
    cases=[
        (f"{name}.tfrecord",)
        for name in (
            "damaged-data",
            "damaged-data-crc",
            "damaged-length",
            "damaged-length-crc",
            "cut-in-data",
            "cut-in-crc",
            "cut-between",
        )
    ]
    + [("cut.tfrecord.gz",)],
)
@scenario(
    "7.1",
    cases=[("cut-in-header.tfrecord",)],
    differs=CUT,
    expect=["aaaa", DataLossError()],
)
@scenario(
    "7.1", cases=[("cut-at-once.tfrecord",)], differs=CUT, expect=[DataLossError()]
)
def damaged_tfrecords(api, name):
    compression = COMPRESSION.get(Path(name).suffix)
    dataset = api.data.TFRecordDataset(_file(name), compression_type=compression)
    result = _read(api, dataset)
    if name == "cut.tfrecord.gz":
        # How much can be read is the decompressor's business.
        return [isinstance(result[-1], Exception)]
    return result


@scenario("7.1")
def tfrecord_errors(api):
    def read(name, **kwargs):
        return lambda: api.numbers(api.data.TFRecordDataset(name, **kwargs))

    return {
        "missing": api.attempt(read(_file("no-such-file"))),
        "gzip_as_plain": api.attempt(read(_file("gzip.tfrecord.gz"))),
        "plain_as_gzip": api.attempt(
            read(_file("plain.tfrecord"), compression_type="GZIP")
        ),
        "text": api.attempt(read(_file("lines.txt"))),
        "number": api.attempt(lambda: api.data.TFRecordDataset(5)),
        "folder": api.fails(read(str(FILES))),
    }


@scenario("7.1", differs="an unknown compression is an error", expect=ValueError)
def unknown_compression(api):
    return api.numbers(
        api.data.TFRecordDataset(_file("one.tfrecord"), compression_type="ZSTD")
    )


@scenario("7.1")
def missing_files_are_found_out_late(api):
    dataset = api.data.TFRecordDataset([_file("one.tfrecord"), _file("no-such-file")])
    return _read(api, dataset)


@scenario("7.1", cases=[("",), ("GZIP",), ("ZLIB",)])
def written_records_are_read_back(api, compression):
    records = [b"", b"abc", bytes(range(256)), b"x" * 5000]
    with tempfile.TemporaryDirectory() as folder:
        name = f"{folder}/records"
        options = api.io.TFRecordOptions(compression_type=compression)
        with api.io.TFRecordWriter(name, options) as writer:
            for record in records:
                writer.write(record)
        dataset = api.data.TFRecordDataset(name, compression_type=compression)
        read = list(dataset.as_numpy_iterator()) == records
        content = Path(name).read_bytes()
    return [read, content[:60].hex() if not compression else content[:1].hex()]


@scenario("7.1")
def tfrecord_writer(api):
    results = []
    with tempfile.TemporaryDirectory() as folder:
        name = f"{folder}/records"
        for _ in range(2):
            writer = api.io.TFRecordWriter(name)
            writer.write(b"a")
            writer.flush()
            results.append(Path(name).stat().st_size)
            writer.close()
            writer.close()
        results.append(Path(name).stat().st_size)
        results.append(api.fails(lambda: writer.write(b"b")))
        with api.io.TFRecordWriter(name, "GZIP") as writer:
            writer.write(b"zipped")
        results.append(
            api.numbers(api.data.TFRecordDataset(name, compression_type="GZIP"))
        )
        results.append(api.fails(lambda: api.io.TFRecordWriter(f"{folder}/no/such")))
        with api.io.TFRecordWriter(name) as writer:
            results.append(api.fails(lambda: writer.write(5)))
    return results


# Text.

TEXTS = (
    "lines.txt",
    "no-final-newline.txt",
    "windows.txt",
    "mixed.txt",
    "empty-lines.txt",
    "utf-8.txt",
    "bytes.txt",
    "spaces.txt",
    "lone-return.txt",
    "empty.txt",
    "long.txt",
    "lines.txt.gz",
    "no-final-newline.txt.gz",
)


@scenario("7.1", cases=[(name,) for name in TEXTS])
def text_lines(api, name):
    compression = COMPRESSION.get(Path(name).suffix)
    return _look(
        api, api.data.TextLineDataset(_file(name), compression_type=compression)
    )


@scenario("7.1")
def text_line_arguments(api):
    Dataset = api.data.TextLineDataset
    files = [_file("no-final-newline.txt"), _file("lines.txt")]
    return {
        "list": api.numbers(Dataset(files)),
        "path": api.numbers(Dataset(FILES / "lines.txt")),
        "dataset": api.numbers(Dataset(api.data.Dataset.from_tensor_slices(files))),
        "buffer": api.numbers(Dataset(files, buffer_size=1)),
        "long_buffer": [
            len(line)
            for line in Dataset(_file("long.txt"), buffer_size=7).as_numpy_iterator()
        ],
        "parallel": sorted(api.numbers(Dataset(files, num_parallel_reads=2))),
        "missing": api.attempt(lambda: api.numbers(Dataset(_file("no-such-file")))),
        "not_gzip": api.attempt(
            lambda: api.numbers(Dataset(files, compression_type="GZIP"))
        ),
    }


@scenario("7.1")
def text_lines_parsed(api):
    dataset = api.data.Dataset.from_tensor_slices(["1", "2.5", "-3e2"])
    return _look(api, dataset.map(lambda line: api.ops.number(line)).batch(2))


# Records of a fixed length.


@scenario("7.1")
def fixed_length_records(api):
    Dataset = api.data.FixedLengthRecordDataset
    return {
        "plain": _look(api, Dataset(_file("fixed-plain.bin"), 3)),
        "header_and_footer": _look(
            api, Dataset(_file("fixed.bin"), 3, header_bytes=4, footer_bytes=2)
        ),
        "gzip": _look(
            api,
            Dataset(
                _file("fixed.bin.gz"),
                3,
                header_bytes=4,
                footer_bytes=2,
                compression_type="GZIP",
            ),
        ),
        "one": api.numbers(Dataset(_file("fixed-plain.bin"), 9)),
        "list": api.numbers(Dataset([_file("fixed-plain.bin")] * 2, 3)),
        "buffer": api.numbers(Dataset(_file("fixed-plain.bin"), 3, buffer_size=2)),
        "empty": api.numbers(Dataset(_file("empty.txt"), 3)),
    }


@scenario("7.1")
def fixed_length_errors(api):
    def read(name, *args, **kwargs):
        """Nothing but the error, or all records."""
        dataset = api.data.FixedLengthRecordDataset
        return lambda: api.numbers(dataset(_file(name), *args, **kwargs))

    return {
        "odd": api.attempt(read("fixed-odd.bin", 3)),
        "large": api.attempt(read("fixed-plain.bin", 10)),
        "missing": api.attempt(read("no-such-file", 3)),
        "zero": api.attempt(read("fixed-plain.bin", 0)),
        "negative": api.attempt(read("fixed-plain.bin", -3)),
        "header_too_large": api.fails(read("empty.txt", 3, header_bytes=4)),
        "odd_gzip": api.attempt(read("fixed.bin.gz", 4, compression_type="GZIP")),
    }


@scenario("7.1")
def fixed_length_records_decoded(api):
    dataset = api.data.FixedLengthRecordDataset(_file("fixed-plain.bin"), 3)
    # Without the spec: TensorFlow does not know how long the decoded records are.
    return api.elements(dataset.map(lambda x: api.ops.decode(x, "uint8")).batch(2))


# Finding files.


def _names(api, dataset):
    return [Path(name).name for name in api.numbers(dataset)]


@scenario("7.1")
def list_files(api):
    find = api.data.Dataset.list_files
    parts = find(_file("part-*.tfrecord"), shuffle=False)
    return {
        "sorted": _names(api, parts),
        "spec": api.spec(parts),
        "cardinality": int(parts.cardinality()),
        "question_mark": _names(api, find(_file("part-?.tfrecord"), shuffle=False)),
        "brackets": _names(api, find(_file("part-[02].tfrecord"), shuffle=False)),
        "one": _names(api, find(_file("one.tfrecord"), shuffle=False)),
        "several": _names(
            api,
            find([_file("part-*.tfrecord"), _file("one.tf*")], shuffle=False),
        ),
        "several_other_order": _names(
            api,
            find([_file("one.tf*"), _file("part-*.tfrecord")], shuffle=False),
        ),
        "twice_the_same": _names(
            api, find([_file("one.tf*"), _file("one*")], shuffle=False)
        ),
        "shuffled": sorted(_names(api, find(_file("part-*"), shuffle=True))),
        "shuffled_by_default": sorted(_names(api, find(_file("part-*")))),
        "one_of_two_without_a_match": _names(
            api, find([_file("no-such-*"), _file("one.tf*")], shuffle=False)
        ),
        "seeded": _names(api, find(_file("*.txt"), seed=1))
        == _names(api, find(_file("*.txt"), seed=1)),
    }


@scenario(
    "7.1",
    differs="Python's own class for files that are not there",
    expect={
        name: FileNotFoundError
        for name in ("pattern", "pattern_in_order", "name", "folder")
    },
)
def list_files_without_a_match(api):
    find = api.data.Dataset.list_files

    def names(*args, **kwargs):
        return lambda: _names(api, find(*args, **kwargs))

    return {
        "pattern": api.attempt(names(_file("no-such-*"))),
        "pattern_in_order": api.attempt(names(_file("no-such-*"), shuffle=False)),
        "name": api.attempt(names(_file("no-such-file"), shuffle=False)),
        "folder": api.attempt(names("/no/such/folder/*", shuffle=False)),
    }


# Examples.


def _examples(api, name="examples.tfrecord"):
    records = api.data.TFRecordDataset(_file(name)).as_numpy_iterator()
    return list(records)


def _batch(records):
    return np.array(records, dtype=object)


def _fixed(api):
    return {
        "id": api.io.FixedLenFeature([], api.int64),
        "pair": api.io.FixedLenFeature([2], api.int64),
        "matrix": api.io.FixedLenFeature([2, 2], api.float32),
    }


@scenario("7.1")
def parse_fixed_features(api):
    records = _examples(api)
    return [
        [api.brief(api.io.parse_single_example(each, _fixed(api))) for each in records],
        api.brief(api.io.parse_example(_batch(records), _fixed(api))),
        api.brief(api.io.parse_example(_batch(records[:1]), _fixed(api))),
    ]


@scenario("7.1")
def parse_with_defaults(api):
    Feature = api.io.FixedLenFeature
    features = {
        "score": Feature([], api.float32, default_value=-1.0),
        "name": Feature([], api.string, default_value=b"nobody"),
        "missing": Feature([2], api.int64, default_value=[7, 8]),
        "missing_matrix": Feature([2, 2], api.float32, default_value=[[0, 1], [2, 3]]),
        "unset": Feature([], api.int64, default_value=5),
        "one_for_all": Feature([1], api.int64, default_value=3),
    }
    records = _examples(api)
    return [
        [api.brief(api.io.parse_single_example(each, features)) for each in records],
        api.brief(api.io.parse_example(_batch(records), features)),
    ]


@scenario("7.1")
def parse_errors(api):
    Feature = api.io.FixedLenFeature
    records = _examples(api)

    def single(record, name, feature, *args, **kwargs):
        def parse():
            features = {name: feature(*args, **kwargs)}
            return api.plain(api.io.parse_single_example(record, features))

        return parse

    def batch(name, *args, **kwargs):
        def parse():
            features = {name: Feature(*args, **kwargs)}
            return api.plain(api.io.parse_example(_batch(records), features))

        return parse

    first, second, *_ = records
    return {
        "missing": api.attempt(single(first, "nothing", Feature, [], api.int64)),
        "missing_in_batch": api.attempt(batch("score", [], api.float32)),
        "type": api.attempt(single(first, "id", Feature, [], api.float32)),
        "too_many": api.attempt(single(first, "pair", Feature, [], api.int64)),
        "too_few": api.attempt(single(first, "id", Feature, [2], api.int64)),
        "none": api.attempt(single(second, "many", Feature, [3], api.int64)),
        "not_an_example": api.attempt(
            single(b"no example at all", "id", Feature, [], api.int64)
        ),
        "no_features": api.attempt(lambda: api.io.parse_single_example(first, {})),
        "empty_batch": api.attempt(
            lambda: api.brief(
                api.io.parse_example(_batch([]).astype("S1"), _fixed(api))
            )
        ),
        "default_shape": api.fails(
            single(first, "nothing", Feature, [2], api.int64, default_value=[1, 2, 3])
        ),
        "another_type": api.fails(single(first, "id", Feature, [], "int32")),
        "varlen_type": api.attempt(
            single(first, "many", api.io.VarLenFeature, api.float32)
        ),
        "unknown_shape": api.fails(single(first, "many", Feature, [None], api.int64)),
    }


@scenario("7.1")
def parse_features_of_varying_length(api):
    features = {
        "many": api.io.VarLenFeature(api.int64),
        "words": api.io.VarLenFeature(api.string),
        "score": api.io.VarLenFeature(api.float32),
        "missing": api.io.VarLenFeature(api.int64),
    }
    records = _examples(api)
    batch = api.io.parse_example(_batch(records), features)
    return [
        {name: api.rows(value) for name, value in batch.items()},
        {name: api.brief(value.values) for name, value in batch.items()},
        [
            {
                name: api.rows(value)
                for name, value in api.io.parse_single_example(each, features).items()
            }
            for each in records
        ],
    ]


@scenario("7.1")
def parse_ragged_features(api):
    features = {
        "many": api.io.RaggedFeature(api.int64),
        "words": api.io.RaggedFeature(api.string),
        "missing": api.io.RaggedFeature(api.float32),
        "renamed": api.io.RaggedFeature(api.int64, value_key="many"),
    }
    records = _examples(api)
    batch = api.io.parse_example(_batch(records), features)
    return [
        {name: api.rows(value) for name, value in batch.items()},
        {name: api.brief(value.values) for name, value in batch.items()},
        {name: api.plain(value.row_splits) for name, value in batch.items()},
        [
            {
                name: api.rows(value)
                for name, value in api.io.parse_single_example(each, features).items()
            }
            for each in records
        ],
    ]


@scenario("7.1")
def parse_sequences_of_fixed_parts(api):
    Feature = api.io.FixedLenSequenceFeature
    features = {
        "many": Feature([], api.int64, allow_missing=True),
        "pairs": Feature([2], api.float32, allow_missing=True),
        "matrix": Feature([2], api.float32, allow_missing=True),
        "words": Feature([], api.string, allow_missing=True, default_value=b"-"),
        "padded": Feature([], api.int64, allow_missing=True, default_value=-1),
    }
    records = _examples(api)
    return [
        api.brief(api.io.parse_example(_batch(records), features)),
        [api.brief(api.io.parse_single_example(each, features)) for each in records],
    ]


@scenario("7.1")
def sequences_have_to_allow_missing(api):
    Feature = api.io.FixedLenSequenceFeature
    record = _examples(api)[0]

    def parse(*args, **kwargs):
        return lambda: api.io.parse_single_example(
            record, {"many": Feature(*args, **kwargs)}
        )

    return [
        api.attempt(parse([], api.int64)),
        api.attempt(parse([2], api.int64, allow_missing=True)),
    ]


@scenario("7.1")
def packed_and_unpacked_numbers(api):
    records = _examples(api, "packed.tfrecord")
    ints = {"n": api.io.FixedLenFeature([2], api.int64)}
    floats = {"n": api.io.FixedLenFeature([2], api.float32)}
    any_length = {"n": api.io.VarLenFeature(api.int64)}
    return [
        api.brief(api.io.parse_example(_batch(records[:2]), ints)),
        api.brief(api.io.parse_example(_batch(records[2:4]), floats)),
        api.brief(api.io.parse_single_example(records[0], ints)),
        api.brief(api.io.parse_single_example(records[3], floats)),
        api.rows(api.io.parse_example(_batch(records[4:]), any_length)["n"]),
        api.attempt(lambda: api.io.parse_single_example(records[4], ints)),
        api.attempt(lambda: api.io.parse_single_example(records[2], ints)),
    ]


@scenario("7.1")
def parse_in_a_pipeline(api):
    dataset = api.data.TFRecordDataset(_file("examples.tfrecord"))
    features = _fixed(api)
    one = dataset.map(lambda x: api.io.parse_single_example(x, features))
    many = dataset.batch(3).map(lambda x: api.io.parse_example(x, features))
    return [
        api.elements(one),
        api.elements(many),
        api.spec(one),
        api.elements(one.map(lambda d: (d["id"], d["pair"])).batch(3)),
    ]


@scenario("7.1")
def parse_a_batch_of_one_and_a_scalar(api):
    record = _examples(api)[0]
    return [
        api.brief(api.io.parse_example(record, _fixed(api))),
        api.brief(api.io.parse_example([record], _fixed(api))),
        api.fails(lambda: api.io.parse_single_example([record], _fixed(api))),
    ]


@scenario("7.1")
def features_are_plain_tuples(api):
    fixed = api.io.FixedLenFeature([2], api.int64)
    varying = api.io.VarLenFeature(api.int64)
    sequence = api.io.FixedLenSequenceFeature([], api.int64, allow_missing=True)
    return [
        fixed.shape,
        fixed.default_value,
        fixed == api.io.FixedLenFeature([2], api.int64),
        varying == api.io.VarLenFeature(api.int64),
        sequence.allow_missing,
        sequence.default_value,
        api.io.RaggedFeature(api.int64).value_key,
    ]


# Files and strategies.


@scenario("7.3", "12.12", cases=[("AUTO",), ("FILE",), ("DATA",), ("OFF",)])
def files_on_one_worker(api, policy):
    strategy = api.mirrored(2)
    parts = [_file(f"part-{i}.tfrecord") for i in range(3)]
    options = api.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        api.data.experimental.AutoShardPolicy[policy]
    )

    def steps(dataset):
        dataset = dataset.with_options(options)
        return api.steps(strategy, strategy.experimental_distribute_dataset(dataset))

    names = api.data.Dataset.from_tensor_slices(parts)
    return {
        "list": steps(api.data.TFRecordDataset(parts).batch(4)),
        "one": steps(api.data.TFRecordDataset(parts[2]).batch(3)),
        "interleave": steps(
            names.interleave(api.data.TFRecordDataset, cycle_length=2).batch(4)
        ),
        "lines": steps(api.data.TextLineDataset(_file("lines.txt")).batch(2)),
        "repeat": steps(
            api.data.TextLineDataset(_file("lines.txt")).batch(2).repeat(2)
        ),
        "list_files": steps(
            api.data.Dataset.list_files(_file("part-*"), shuffle=False)
            .flat_map(api.data.TFRecordDataset)
            .batch(4)
        ),
        "map": steps(
            api.data.TFRecordDataset(_file("examples.tfrecord"))
            .map(lambda x: api.io.parse_single_example(x, _fixed(api))["matrix"])
            .batch(3)
        ),
    }
