"""Every name that a page lists is used in a test of what the page says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .pages import PAGES

HERE = Path(__file__).parent

# Where the behaviour of a page's class is tested.
FILES = {
    "000": "test_r2_0.py",
    "001": "test_compat_v1.py",
    "002": "test_r2_0.py",
    "003": "test_contrib.py",
}


def tree(page: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((HERE / FILES[page]).read_text())))


@pytest.mark.parametrize("page", PAGES)
def test_every_method_is_called(page: str) -> None:
    calls = [node.func for node in tree(page) if isinstance(node, ast.Call)]
    called = {func.attr for func in calls if isinstance(func, ast.Attribute)}
    assert not PAGES[page]["methods"].keys() - called


@pytest.mark.parametrize("page", PAGES)
def test_every_property_member_and_value_is_read(page: str) -> None:
    lists = PAGES[page]
    members = [name.partition(".")[2] for name in lists["members"]]
    read = {node.attr for node in tree(page) if isinstance(node, ast.Attribute)}
    assert not {*lists["properties"], *members, *lists["values"]} - read


@pytest.mark.parametrize("page", PAGES)
def test_every_argument_of_the_constructor_and_keyword_is_given(page: str) -> None:
    wanted = re.findall(r"(\w+)=", PAGES[page]["constructor"])
    given = {node.arg for node in tree(page) if isinstance(node, ast.keyword)}
    given |= {node.value for node in tree(page) if isinstance(node, ast.Constant)}
    assert not {*wanted, *PAGES[page]["keywords"]} - given
