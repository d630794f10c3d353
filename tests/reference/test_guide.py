"""docs/names.md has a row for everything that the pages list, and names what exists."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

import mirrax as mx

from .pages import PAGES, SLIPS

GUIDE = (Path(__file__).parents[2] / "docs" / "names.md").read_text()

# The part of the guide with a page's tables.
PARTS = {
    "000": "Names of 2.0",
    "001": "Names of compat.v1",
    "002": "Names of 2.0",
    "003": "Names of 1.11",
}


def codes(text: str) -> set[str]:
    """The code in the first column of the tables in `text`."""
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return {code for cell in cells for code in re.findall(r"`([^`]+)`", cell)}


def part(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", GUIDE, re.M | re.S)
    assert found, f"the guide has no part {title!r}"
    return found[1]


def own_names(page: str) -> list[str]:
    """The class, its arguments, properties and methods, as the guide writes them."""
    lists = PAGES[page]
    methods = [
        f"{name}({re.sub(r'=[^,]*', '', parameters)})"
        for name, parameters in lists["methods"].items()
    ]
    arguments = re.findall(r"(\w+)=", lists["constructor"])
    return [lists["class"], *arguments, *lists["properties"], *methods]


def other_names(page: str) -> list[str]:
    """What the page uses besides: names, types, members of objects, values, keywords."""
    lists = PAGES[page]
    kinds = ("names", "types", "members", "values", "keywords")
    names = [name for kind in kinds for name in lists[kind] if name not in SLIPS]
    of_the_class = {f"strategy.{n}" for n in [*lists["properties"], *lists["methods"]]}
    return [name for name in names if name not in of_the_class]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_s_part_has_everything_of_its_class(page: str) -> None:
    missing = set(own_names(page)) - codes(part(PARTS[page]))
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_have_everything_else_that_the_page_uses(page: str) -> None:
    short = {code.rpartition(".")[2] for code in codes(GUIDE) if code.startswith("tf.")}
    missing = set(other_names(page)) - codes(GUIDE) - short
    assert not missing


def test_every_name_of_mirrax_in_the_guide_exists() -> None:
    names = set(re.findall(r"\bmx(?:\.\w+)+", GUIDE))
    assert len(names) > 40
    for name in names:
        assert functools.reduce(getattr, name.split(".")[1:], mx) is not mx


def test_links_within_the_guide_lead_to_its_headings() -> None:
    headings = re.findall(r"^#+ (.*)$", GUIDE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
    links = re.findall(r"\]\(#([^)]+)\)", GUIDE)
    assert links and not set(links) - anchors
