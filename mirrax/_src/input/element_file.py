"""All elements of a dataset in one file, for `cache`: a TFRecord file that runs no code.

The first record tells in JSON how many elements follow and what they are made of; each of
the others is an element (encoding.py). Records have checksums.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from mirrax._src.input.encoding import decode, encode, spec_from_json, spec_to_json
from mirrax._src.input.node import merge_specs
from mirrax._src.input.reading import FileReader
from mirrax._src.input.record_forms import TFRecords
from mirrax._src.input.streams import BUFFER_BYTES
from mirrax._src.input.structure import DatasetSpec, leaves_of, spec_of
from mirrax._src.input.transforms.selecting import check_alike
from mirrax._src.input.writing import TFRecordWriter

_FORMAT = "mirrax cache 1"


def write_elements(file: Path, elements: list[Any]) -> None:
    """Writes a file that is either there with all elements or not there at all.

    Raises:
        TypeError: If the elements are not arrays, strings and structures of them.
    """
    header = {
        "format": _FORMAT,
        "count": len(elements),
        "element_spec": spec_to_json(_spec_of_all(elements)),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    os.close(number)
    try:
        with TFRecordWriter(name) as writer:
            writer.write(json.dumps(header).encode())
            for element in elements:
                writer.write(encode(element))
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def read_elements(file: Path) -> list[Any]:
    """What `write_elements` has written.

    Raises:
        ValueError: If the file holds something else.
        mx.errors.DataLossError: If it is damaged.
    """
    records = FileReader((str(file),), "", BUFFER_BYTES, TFRecords()).open((), None)
    try:
        header = json.loads(next(records, b"{}"))
        if header.get("format") != _FORMAT:
            raise ValueError(f"it does not begin with {_FORMAT!r}")
        spec = spec_from_json(header["element_spec"])
        elements = [decode(record, spec) for record in records]
    finally:
        records.close()
    if len(elements) != header["count"]:
        raise ValueError(f"it has {len(elements)} of {header['count']} elements")
    return elements


def _spec_of_all(elements: list[Any]) -> Any:
    found: Any = None
    for element in elements:
        spec = spec_of(element)
        if found is None:
            found = spec
        elif spec != found:
            check_alike(found, spec, "Elements that are kept in a file")
            found = merge_specs([found, spec])
    if any(isinstance(leaf, DatasetSpec) for leaf in leaves_of(found)):
        raise TypeError(
            f"Datasets in elements cannot be kept in a file: {found}. Make arrays of them "
            "first: `flat_map(lambda window: window.batch(n))`."
        )
    return found
