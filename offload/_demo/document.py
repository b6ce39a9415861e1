"""The document that the demo's engine reads: the project's documentation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def document(nbytes: int, root: Path = ROOT) -> tuple[bytes, str]:
    """Return the project's own documentation, and its source.

    The pages of a checkout, or else the docstrings of the packages.
    """
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    if all(page.is_file() for page in pages) and len(pages) > 1:
        parts, source = [page.read_text(encoding="utf-8") for page in pages], "README and docs"
    else:
        files = [file for package in ("offload", "backends", "maru") for file in sorted((root / package).rglob("*.py"))]
        parts, source = [text for file in files for text in _docstrings(file)], "docstrings"
    text = "\n".join(parts).encode()
    while len(text) < nbytes:  # a small installation
        text += text
    return text[:nbytes], source


def _docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
