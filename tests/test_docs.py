"""README and docs: examples run, links lead somewhere, and quoted messages exist.

The examples are Python blocks and the plus lines of diffs.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import mirrax

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = ("keras.md", "summaries.md")  # tests/interop has the libraries
BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_of(kind: str, text: str) -> str:
    if kind == "python":
        return text
    kept = [line[1:] for line in text.splitlines() if not line.startswith("-")]
    return "\n".join(kept) + "\n"


@pytest.mark.filterwarnings("ignore:.*(is the older name|has nothing to do)")
@pytest.mark.parametrize(
    "page",
    [
        PAGES[0],
        *(
            pytest.param(page, marks=pytest.mark.slow)
            for page in PAGES[1:]
            if page.name not in ELSEWHERE
        ),
    ],
    ids=lambda path: path.name,
)
def test_examples_run(page: Path) -> None:
    names: dict[str, object] = {}
    text = page.read_text()
    for block in BLOCK.finditer(text):
        line = text[: block.start()].count("\n") + 1
        code = "\n" * line + code_of(block[1], block[2])
        exec(compile(code, str(page), "exec"), names)
    names.clear()  # JAX's caches hold functions, and these their globals: iterators, too


def test_the_readme_has_examples() -> None:
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    assert len(blocks) >= 3


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files that a page links to, and the headings in them."""
    for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        yield (page.parent / path).resolve() if path else page, heading


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    titles = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M
    )
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, heading in links(page):
        assert path.exists(), f"{page.name} links to {path}"
        assert not heading or heading in anchors(path), (
            f"{page.name} links to #{heading}"
        )


def in_nav(nav: Any) -> Iterator[str]:
    for part in nav.values() if isinstance(nav, dict) else nav:
        if isinstance(part, str):
            yield part
        else:
            yield from in_nav(part)


def test_every_page_is_in_the_navigation() -> None:
    nav = list(in_nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    made = {"api/", "examples/"}  # by docs/building.py
    outside = {"benchmarks/RESULTS.md", "CHANGELOG.md", "CONTRIBUTING.md"}
    assert all((ROOT / name).exists() for name in outside)
    pages = {page.name for page in PAGES[1:]}
    assert set(nav) == pages | made | outside and len(nav) == len(set(nav))


@functools.cache
def texts_of_the_package() -> str:
    """All string literals of mirrax, with a mark where a value is put in."""
    found = []
    for file in (Path(mirrax.__path__[0]) / "_src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", None) for part in node.values]
                found.append("".join(p if isinstance(p, str) else "\0" for p in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_the_messages_on_the_page_of_errors_exist() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    quoted = re.findall(r"^> (.*)$", page, re.MULTILINE)
    assert len(quoted) > 30
    for message in quoted:
        if message.startswith(("ConcretizationTypeError", "'NoneType' object")):
            continue  # JAX's, and Python's
        for piece in message.split("..."):
            assert piece.strip() in texts_of_the_package(), message
