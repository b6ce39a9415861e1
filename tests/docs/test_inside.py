"""Tests import what users import; those that look inside stand in one table, each for a reason, and become fewer."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.code_figures import is_public

ROOT = Path(__file__).parents[2]
PACKAGES = ("offload", "backends", "maru")
TABLE = tomllib.loads((ROOT / "tests" / "support" / "inside.toml").read_text())
PURE = next(
    contract["source_modules"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    if contract["name"].startswith("Pure modules")
)
PLANTED = ROOT / "tests" / "support" / "planted"


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def is_pure(module: str) -> bool:
    return any(module == core or module.startswith(f"{core}.") for core in PURE)


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """The module and the name of each import of ours; no name for a module."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from [(alias.name, "") for alias in node.names if alias.name.split(".")[0] in PACKAGES]
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and node.module
            and node.module.split(".")[0] in PACKAGES
        ):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole, "") if is_module(whole) else (node.module, alias.name)


def inside(file: Path) -> set[str]:
    """The private modules that a file of tests imports, pure cores left out."""
    return {
        module
        for module, name in imported(file)
        if not is_public(f"{module}.{name}".split(".")) and not is_pure(module)
    }


@cache
def found() -> dict[str, set[str]]:
    """The private modules that each file of tests imports. Not at the import: every worker would read all files."""
    return {
        str(file.relative_to(ROOT)): modules
        for file in sorted((ROOT / "tests").rglob("*.py"))
        if PLANTED not in file.parents and (modules := inside(file))
    }


def test_the_table_has_every_test_that_looks_inside_and_no_other() -> None:
    told = [file for reason in TABLE["reason"] for file in reason["files"]]
    assert len(set(told)) == len(told), "a file stands there twice"
    assert sorted(told) == sorted(found())


def test_they_become_fewer() -> None:
    """A new one that must be is paid for with an old one that need not be."""
    modules = set().union(*found().values())
    assert len(modules) <= TABLE["most"], f"{len(modules)} private modules are imported by tests"
    assert len(modules) > TABLE["most"] - 10, f"{len(modules)} are left: say so in the table"


def test_no_package_imports_private_modules_of_another() -> None:
    reached = [
        f"{file.relative_to(ROOT)}: {module}"
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        for module, name in imported(file)
        if module.split(".")[0] != package and any(part.startswith("_") for part in f"{module}.{name}".split("."))
    ]
    assert not reached
