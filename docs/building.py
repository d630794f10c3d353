"""What `mkdocs build` adds to docs/: the API reference, the examples, and files of the repository.

Pages link to files as they lie in the repository (`../examples/demo.py`), which works there and
in editors. On the site such a file is a page of its own, and the links lead to it.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
COPIED = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")
NOT_SHOWN = {"_src", "__main__", "compat", "contrib"}  # names.md has the older names
OUTSIDE = re.compile(
    r"\]\(\.\./((?:examples|benchmarks)/[\w/.]*|[A-Z]+\.md)(#[\w-]*)?\)"
)


def on_files(files: Any, config: Any) -> None:
    """Adds the pages that are made from other files."""
    pages = {name: (ROOT / name).read_text() for name in COPIED}
    pages |= dict(api_pages())
    pages |= {f"{p.relative_to(ROOT)}.md": example_page(p) for p in examples()}
    pages["examples/index.md"] = examples_index()
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))


def on_config(config: Any) -> None:
    """Fills the parts of the navigation that are folders of such pages."""
    lists = {
        "api/": [uri for uri, _ in api_pages()],
        "examples/": [
            "examples/index.md",
            *(f"{p.relative_to(ROOT)}.md" for p in examples()),
        ],
    }
    for part in config["nav"]:
        for title, target in part.items():
            part[title] = (
                lists.get(target, target) if isinstance(target, str) else target
            )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lets links to files of the repository lead to their pages."""
    up = "../" * page.file.src_uri.count("/")
    if page.file.src_uri in COPIED:  # written for another folder
        markdown = re.sub(r"\]\((?:\.\./)*docs/", f"]({up}", markdown)
        markdown = re.sub(r"\]\((?:\.\./)*examples/", "](../examples/", markdown)

    def lead(link: re.Match[str]) -> str:
        target = link[1] if link[1].endswith(".md") else link[1].rstrip("/") + ".md"
        target = "examples/index.md" if target == "examples.md" else target
        return f"]({up}{target}{link[2] or ''})"

    return OUTSIDE.sub(lead, markdown)


def examples() -> list[Path]:
    folder = ROOT / "examples"
    return sorted([*folder.glob("*.ipynb"), *folder.rglob("*.py")])


def example_page(path: Path) -> str:
    title = f"# {path.relative_to(ROOT / 'examples')}\n\n"
    if path.suffix == ".py":
        return f"{title}```python\n{path.read_text()}```\n"
    text = ""
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        is_code = cell["cell_type"] == "code"
        text += f"```python\n{source}\n```\n\n" if is_code else f"{source}\n\n"
    return text


def examples_index() -> str:
    rows = ["# Examples", "", "Whole programs, which the tests run.", ""]
    for path in examples():
        name = path.relative_to(ROOT / "examples")
        doc = "A notebook to begin with."
        if path.suffix == ".py":
            doc = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        rows.append(f"- [{name}]({name}.md): {doc}")
    return "\n".join(rows) + "\n"


def api_pages() -> list[tuple[str, str]]:
    """A page for each public module: all names that it exports, with their docstrings."""
    found = doors()
    everything = {name for names in found.values() for name in names}
    elsewhere = {name for door in found if door != "mirrax" for name in found[door]}
    pages = []
    for module, homes in found.items():
        names = sorted(homes if module != "mirrax" else homes.keys() - elsewhere)
        entries = [entry(module, name, homes[name], everything) for name in names]
        head = f"# {module.replace('mirrax', 'mx', 1)}\n\n{docstring_of(module)}"
        if module == "mirrax":
            head += "\n\nAlso here: " + ", ".join(
                f"`mx.{name}`" for name in sorted(homes.keys() & elsewhere)
            )
        uri = module.removeprefix("mirrax").lstrip(".") or "index"
        pages.append((f"api/{uri}.md", "\n\n".join([head, *entries]) + "\n"))
    return pages


def entry(module: str, name: str, home: str, public: set[str]) -> str:
    """What mkdocstrings replaces by an object's documentation.

    What a class inherits is shown with it, unless a public class has it.
    """
    tree = ast.parse(file_of(home).read_text())
    bases = [
        ast.unparse(base)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == name
        for base in node.bases
    ]
    is_whole = bool(bases) and not public & set(bases)
    options = "\n    options:\n        inherited_members: true" if is_whole else ""
    return f"::: {module}.{name}{options}"


def doors() -> dict[str, dict[str, str]]:
    """By public module, the names that it exports and the module that each comes from."""
    found = {}
    for path in sorted((ROOT / "mirrax").rglob("*.py")):
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        if set(name.split(".")) & NOT_SHOWN:
            continue
        homes = {
            alias.asname or alias.name: node.module or ""
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("mirrax._src")
            for alias in node.names
            if not (alias.asname or alias.name).startswith("_")
        }
        if homes:
            found[name.removesuffix(".__init__")] = homes
    return found


def docstring_of(module: str) -> str:
    return ast.get_docstring(ast.parse(file_of(module).read_text())) or ""


def file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


class PublicParts(griffe.Extension):
    """Leaves out what `hides` keeps from users, and marks examples in docstrings as code.

    Markdown would take `>>>` for a quotation.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for cls in classes_of(pkg):
            family = [cls, *cls.mro()]
            for name in [name for member in family for name in hidden_by(member)]:
                for member in family:  # a class hides what its bases bring, too
                    member.members.pop(name, None)


def classes_of(module: griffe.Module) -> list[griffe.Class]:
    found = [member for member in module.members.values() if not member.is_alias]
    classes = [member for member in found if isinstance(member, griffe.Class)]
    for inner in found:
        if isinstance(inner, griffe.Module):
            classes += classes_of(inner)
    return classes


def hidden_by(cls: griffe.Class) -> list[str]:
    texts = [str(decorator.value) for decorator in cls.decorators]
    return [
        n for t in texts if t.startswith("hides(") for n in re.findall(r"\w+", t)[1:]
    ]


def fence(text: str) -> str:
    """`text` with a fence around each example that begins with `>>>`."""
    lines: list[str] = []
    is_open = False
    for line in text.splitlines():
        if not is_open and line.lstrip().startswith(">>>"):
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}```pycon")
            is_open = True
        elif is_open and not line.strip():
            lines.append(f"{indent}```")
            is_open = False
        lines.append(line)
    if is_open:
        lines.append(f"{indent}```")
    return "\n".join(lines)
