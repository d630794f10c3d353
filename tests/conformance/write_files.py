"""Writes files/, with TensorFlow: what record_files.py reads.

python tests/conformance/write_files.py
"""

import gzip
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import tensorflow as tf

FILES = Path(__file__).parent / "files"
RECORDS = [b"first", b"", b"third\nwith a line", "ünicode".encode(), bytes(range(256))]


def main() -> None:
    FILES.mkdir(exist_ok=True)
    write_records("plain.tfrecord", RECORDS)
    write_records("gzip.tfrecord.gz", RECORDS, "GZIP")
    write_records("zlib.tfrecord.zlib", RECORDS, "ZLIB")
    write_records("empty.tfrecord", [])
    write_records("empty.tfrecord.gz", [], "GZIP")
    write_records("one.tfrecord", [b"only"])
    write_records("large.tfrecord", [bytes([65 + i]) * 300 for i in range(6)])
    for part in range(3):
        records = [f"{part}-{i}".encode() for i in range(2 + part)]
        write_records(f"part-{part}.tfrecord", records)
    write_damaged()
    write_text()
    write_fixed_length()
    write_examples()
    size = sum(file.stat().st_size for file in FILES.rglob("*"))
    print(f"{size} bytes in {FILES}")


def write_records(name: str, records: list[bytes], compression: str = "") -> None:
    options = tf.io.TFRecordOptions(compression_type=compression)
    with tf.io.TFRecordWriter(str(FILES / name), options) as writer:
        for record in records:
            writer.write(record)


def write_damaged() -> None:
    """A record is 8 bytes of length, 4 of CRC, the data, 4 of CRC."""
    write_records("damaged.tfrecord", [b"aaaa", b"bbbb", b"cccc"])
    whole = (FILES / "damaged.tfrecord").read_bytes()
    (FILES / "damaged.tfrecord").unlink()
    damages = {
        "damaged-data": _flip(whole, 20 + 12),
        "damaged-data-crc": _flip(whole, 20 + 17),
        "damaged-length": _flip(whole, 20 + 2),
        "damaged-length-crc": _flip(whole, 20 + 9),
        "cut-in-header": whole[: 20 + 5],
        "cut-in-data": whole[: 20 + 14],
        "cut-in-crc": whole[: 20 + 18],
        "cut-between": whole[:40],
        "cut-at-once": whole[:3],
    }
    for name, content in damages.items():
        (FILES / f"{name}.tfrecord").write_bytes(content)
    zipped = (FILES / "gzip.tfrecord.gz").read_bytes()
    (FILES / "cut.tfrecord.gz").write_bytes(zipped[: len(zipped) // 2])


def _flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


def write_text() -> None:
    contents = {
        "lines.txt": b"one\ntwo\nthree\n",
        "no-final-newline.txt": b"one\ntwo",
        "windows.txt": b"one\r\ntwo\r\n",
        "mixed.txt": b"one\r\ntwo\nthree\r\n\r\nfive",
        "empty-lines.txt": b"\n\none\n\n\ntwo\n\n",
        "utf-8.txt": "grüße\n日本\n".encode(),
        "bytes.txt": b"\xff\xfe\n\x00a\n",
        "spaces.txt": b"  a b \n\tc\n",
        "lone-return.txt": b"a\rb\nc\r\n\r",
        "empty.txt": b"",
        "long.txt": b"x" * 600 + b"\n" + b"y" * 10,
    }
    for name, content in contents.items():
        (FILES / name).write_bytes(content)
    for name in ("lines.txt", "no-final-newline.txt"):
        (FILES / f"{name}.gz").write_bytes(gzip.compress(contents[name], mtime=0))


def write_fixed_length() -> None:
    (FILES / "fixed.bin").write_bytes(b"HEADaaabbbcccFT")
    (FILES / "fixed-plain.bin").write_bytes(b"aaabbbccc")
    (FILES / "fixed-odd.bin").write_bytes(b"aaabbbcc")
    (FILES / "fixed.bin.gz").write_bytes(gzip.compress(b"HEADaaabbbcccFT", mtime=0))


def write_examples() -> None:
    write_records("examples.tfrecord", [each.SerializeToString() for each in EXAMPLES])
    write_records("packed.tfrecord", PACKED)


def ints(*values: int) -> tf.train.Feature:
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def floats(*values: float) -> tf.train.Feature:
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def strings(*values: bytes) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def example(**features: tf.train.Feature) -> tf.train.Example:
    return tf.train.Example(features=tf.train.Features(feature=features))


EXAMPLES = [
    example(
        id=ints(1),
        pair=ints(1, -2),
        score=floats(0.5),
        name=strings(b"one"),
        many=ints(1, 2, 3),
        words=strings(b"a", b"bc"),
        matrix=floats(1, 2, 3, 4),
    ),
    example(
        id=ints(-(2**63)),
        pair=ints(2**63 - 1, 0),
        score=floats(-1e30),
        name=strings("zwölf".encode()),
        many=ints(),
        words=strings(),
        matrix=floats(5, 6, 7, 8),
    ),
    example(
        id=ints(3),
        pair=ints(5, 6),
        name=strings(b""),
        many=ints(-7),
        matrix=floats(9, 10, 11, 12),
    ),
    example(
        id=ints(4),
        pair=ints(7, 8),
        score=floats(2.25),
        many=ints(*range(4)),
        words=strings(b"\x00\xff"),
        matrix=floats(0, 0, 0, 1),
        extra=ints(9),
        unset=tf.train.Feature(),
    ),
]

# The same features as another writer may put them: ints and floats packed or one a
# field. Example { features { feature { key "n" value { int64_list { 1, 300 } } } } }
PACKED = [
    bytes([10, 14, 10, 12, 10, 1, 110, 18, 7, 26, 5, 10, 3, 1, 0xAC, 2]),
    bytes([10, 14, 10, 12, 10, 1, 110, 18, 7, 26, 5, 8, 1, 8, 0xAC, 2]),
    bytes(
        [10, 19, 10, 17, 10, 1, 110, 18, 12, 18, 10, 10, 8]
        + [0, 0, 0x80, 0x3F, 0, 0, 0, 0x40]
    ),
    bytes(
        [10, 19, 10, 17, 10, 1, 110, 18, 12, 18, 10, 13]
        + [0, 0, 0x80, 0x3F, 13, 0, 0, 0, 0x40]
    ),
    b"",
]


if __name__ == "__main__":
    main()
