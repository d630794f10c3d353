"""Reads TensorFlow's API pages: writes what they list into pages.json.

python tests/reference/record.py FOLDER            # FOLDER/*.txt are the pages
python tests/reference/record.py FOLDER --check    # only compares with what is recorded

The pages are of four releases and in four formats: two kinds of Markdown, HTML in
Markdown, and text whose headings have run into their neighbours. They differ in how the
heading of a member looks. What follows it up to the next heading is the member's
section; a member whose section has a call of it is a method, any other a property.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "pages.json"

BASE = re.compile(r"\[(\w+)\][^\n]*Inherits From|Inherits From: \W*(\w+)")
CLASS = re.compile(r"^(?:# |- Class `)?(tf\.[\w.]+Strategy)[`(]?$", re.MULTILINE)
HEADINGS = [
    re.compile(r"^#{2,3} `?([a-z_]\w*)`?$", re.MULTILINE),
    re.compile(r'^<h[23] id="(\w+)">.*$', re.MULTILINE),
    re.compile(r"(?:^|(?<=\.))([a-z_]\w*)(?=\1\()", re.MULTILINE),  # reducereduce(
]
# Where properties have no headings: rows of a table, and `name:   what it is`.
ATTRIBUTES = re.compile(r"^Attributes *\n---(.*?)^## ", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^`(\w+)` \|", re.MULTILINE)
RUN_ON_ROW = re.compile(r"(\w+): {3}")

# What texts and examples use besides the class: names of TensorFlow, with and without
# its module, members of objects, values of enumerations, keywords of `**kwargs`.
NAME = re.compile(r"\btf(?:\.(?!A\b)\w+)+")  # "tf.data.Dataset.A distributed ..."
OBJECTS = "strategy extended input_context value_context cluster_resolver iterator context tower_ctx"
MEMBER = re.compile(rf"\b({OBJECTS.replace(' ', '|')})\.(?=([a-z]\w*))")
STARTED = re.compile(r"(iterator) object that should first be `\.(\w+)\(\)`")
STEPS = re.compile(r"the `MultiStepContext` object(.*?)^<h3", re.MULTILINE | re.DOTALL)
TYPE = re.compile(r"`([A-Z][a-z]+[A-Z]\w+)(?:\(\))?`")
VALUE = re.compile(r"`([A-Z]{2,}(?:_[A-Z]+)*)`")
KEYWORD = re.compile(r'`"(\w+)"`: ')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pages are")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()

    paths = sorted(options.folder.glob("*.txt"))
    if not paths:
        parser.error(f"There are no pages (*.txt) in {options.folder}.")
    pages = {path.name[:3]: read_page(path.read_text()) for path in paths}
    if not options.check:
        RECORDED.write_text(json.dumps(pages, indent=2) + "\n")
    is_same = pages == json.loads(RECORDED.read_text())
    print(f"{len(pages)} pages, {'as' if is_same else 'other than'} recorded.")
    return 0 if is_same else 1


def read_page(text: str) -> dict[str, Any]:
    """Everything that a page lists, in its order."""
    found, base = CLASS.search(text), BASE.search(text)
    assert found and base, "The page does not say which class it is about."
    calls = {name: parameters(name, section) for name, section in sections(text)}
    constructor = calls.pop("__init__", None)
    if constructor is None:
        constructor = parameters(found[1], text)
    return {
        "class": found[1],
        "base": base[1] or base[2],
        "constructor": constructor,
        "properties": [*unheaded(text), *(n for n, p in calls.items() if p is None)],
        "methods": {name: p for name, p in calls.items() if p is not None},
        "names": once(NAME.findall(text)),
        "types": once(TYPE.findall(text)),
        "members": once(members(text)),
        "values": once(VALUE.findall(text)),
        "keywords": once(KEYWORD.findall(text)),
    }


def sections(text: str) -> Iterator[tuple[str, str]]:
    """The members that have a heading, with the text below it."""
    heads = [match for heading in HEADINGS for match in heading.finditer(text)]
    heads.sort(key=lambda match: match.start())
    ends = [match.start() for match in heads[1:]] + [len(text)]
    for head, end in zip(heads, ends):
        yield head[1], text[head.end() : end]


def parameters(name: str, text: str) -> str | None:
    """The parameters in the first call of `name` that stands by itself in `text`."""
    call = re.search(rf"^ *{re.escape(name)}\(((?:[^()]|\(\))*)\)$", text, re.M)
    if call is None:
        return None
    return " ".join(call[1].split())


def unheaded(text: str) -> list[str]:
    """The properties that have no heading."""
    table = ATTRIBUTES.search(text)
    return ROW.findall(table[1]) if table else RUN_ON_ROW.findall(text)


def members(text: str) -> list[str]:
    """`object.member` of the objects that a user meets; those of a list of results, too."""
    found = MEMBER.findall(text) + STARTED.findall(text)
    results = STEPS.search(text)
    if results:
        names = re.findall(r"^ +- (\w+): ", results[1], re.MULTILINE)
        found += [("context", name) for name in names]
    return [".".join(pair) for pair in found]


def once(names: list[str]) -> list[str]:
    return sorted(set(names))


if __name__ == "__main__":
    sys.exit(main())
