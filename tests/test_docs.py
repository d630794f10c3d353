"""Every example in README and docs runs: Python blocks, and the plus lines of diffs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
    assert len(blocks) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text())
    missing = [t for t in targets if not (page.parent / t).exists()]
    assert not missing
