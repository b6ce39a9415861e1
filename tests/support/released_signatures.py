"""Our adapters beside the released packages of the engines that they are for: names and signatures, read and never imported.

    python -m tests.support.released_signatures                   fetch the wheels that noxfile.py names, without dependencies
    python -m tests.support.released_signatures --wheels FOLDER   compare with wheels that lie there

Rule 1. What an adapter imports of an engine is there.
Rule 2. What an engine declares abstract, the adapter has.
Rule 3. What an engine calls on its base class can be called on the adapter: the same names in the same order; what is left
        out there may be left out here, and what only the adapter knows may be left out.
Rule 4. What is written down of an engine for a type checker, or stands in for it in tests, is there and is called so.

It ends with 1 where something differs, and with 2 where a wheel could not be had: then nothing was compared.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = ROOT / "offload" / "engines"
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

ENGINES = {"vllm": "VLLM", "lmcache": "LMCACHE", "sglang": "SGLANG"}
"""Packages of engines, and the constant of noxfile.py that has the requirement of each, alone or first of several."""

DERIVED = (
    ("vllm/_connector.py", "OffloadConnector", "vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1"),
    ("vllm/_connector.py", "OffloadConnector", "vllm.distributed.kv_transfer.kv_connector.v1.base", "SupportsHMA"),
    ("vllm/_spec.py", "OffloadSpec", "vllm.v1.kv_offload.base", "OffloadingSpec"),
    ("vllm/_spec.py", "HostManager", "vllm.v1.kv_offload.base", "OffloadingManager"),
    ("vllm/_spec.py", "RowWorker", "vllm.v1.kv_offload.base", "OffloadingWorker"),
    ("lmcache/_adapter.py", "MaruL2Adapter", "lmcache.v1.distributed.l2_adapters.base", "L2AdapterInterface"),
    ("lmcache/_adapter.py", "MaruL2AdapterConfig", "lmcache.v1.distributed.l2_adapters.config", "L2AdapterConfigBase"),
    ("lmcache/_l1.py", "MaruL1Manager", "lmcache.v1.distributed.l1_manager", "L1ManagerInterface"),
    ("lmcache/_l1.py", "MaruL1Manager", "lmcache.v1.distributed.memory_manager.l1_manager_protocol", "L1ManagerProtocol"),
    ("lmcache/_allocator.py", "MaruMemoryAllocator", "lmcache.v1.memory_management", "MemoryAllocatorInterface"),
    ("sglang/_hicache.py", "HiCacheOffload", "sglang.srt.mem_cache.hicache_storage", "HiCacheStorage"),
)  # fmt: skip
"""A class in a file of offload/engines, and the class of an engine whose place it takes."""

STAND_INS = {"tests/engines/sglang/interface.py": "sglang.srt.mem_cache.hicache_storage"}
"""Files whose classes stand in for those of a module."""


# --- what a wheel has -------------------------------------------------------------------------------------------------


class Wheel:
    """A released package, read from its wheel."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self._files = set(self._archive.namelist())
        self._trees: dict[str, ast.Module] = {}

    def module(self, name: str) -> ast.Module:
        """The source of a module, or the stub of one that is compiled.

        Raises:
            LookupError: there is none.
        """
        if name not in self._trees:
            path = name.replace(".", "/")
            file = next((f for f in (f"{path}.py", f"{path}/__init__.py", f"{path}.pyi") if f in self._files), None)
            if file is None:
                raise LookupError(f"{name} is not there")
            self._trees[name] = ast.parse(self._archive.read(file))
        return self._trees[name]

    def find(self, module: str, name: str) -> tuple[str, ast.AST]:
        """What a module calls by this name, or has as a module of its own, and the module that defines it.

        Raises:
            LookupError: it does not.
        """
        for node in _statements(self.module(module).body):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        origin = _absolute(module, node)
                        return self.find(origin, alias.name) if origin.partition(".")[0] in ENGINES else (module, node)
            elif name in _names(node):
                return module, node
        try:
            return f"{module}.{name}", self.module(f"{module}.{name}")
        except LookupError:
            raise LookupError(f"{module} has no {name}") from None

    def methods(self, module: str, name: str) -> dict[str, Function]:
        """The methods of a class, inherited ones too as far as the package defines them.

        Raises:
            LookupError: there is no such class.
        """
        home, node = self.find(module, name)
        if not isinstance(node, ast.ClassDef):
            raise LookupError(f"{module}.{name} is no class")
        found: dict[str, Function] = {}
        for base in reversed(node.bases):
            if isinstance(base, ast.Name):
                try:
                    found.update(self.methods(home, base.id))
                except LookupError:
                    continue  # of the standard library, or of another package
        return {**found, **methods_of(node)}

    def members(self, module: str, name: str) -> set[str]:
        """The names that a class has: methods, fields, and what its own methods set."""
        home, node = self.find(module, name)
        assert isinstance(node, ast.ClassDef)
        found = {"__init__", *self.methods(module, name), *(name for part in node.body for name in _names(part))}
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                found.add(part.attr)
        for base in node.bases:
            if isinstance(base, ast.Name):
                try:
                    found |= self.members(home, base.id)
                except (LookupError, AssertionError):
                    continue
        return found


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, those that stand behind a condition too."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, field, ()))


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".")[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def methods_of(node: ast.ClassDef) -> dict[str, Function]:
    """Its own methods. Not those of which a stub tells several forms: which of them is meant is not to be seen."""
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {method.name: method for method in methods if "overload" not in map(ast.unparse, method.decorator_list)}


def is_abstract(method: Function) -> bool:
    return any("abstractmethod" in ast.unparse(decorator) for decorator in method.decorator_list)


# --- comparing --------------------------------------------------------------------------------------------------------


def differences(ours: Function, theirs: Function) -> Iterator[str]:
    """Why a call that fits their function does not fit ours."""
    if [
        ast.unparse(d) for d in ours.decorator_list if ast.unparse(d) in ("property", "classmethod", "staticmethod")
    ] != [
        ast.unparse(d) for d in theirs.decorator_list if ast.unparse(d) in ("property", "classmethod", "staticmethod")
    ]:
        yield "is another kind of method"
    mine, others = _parameters(ours), _parameters(theirs)
    for at, (name, optional) in enumerate(others):
        if ours.args.vararg is not None and at >= len(mine):
            break
        if at >= len(mine):
            if ours.args.kwarg is None:
                yield f"does not take {name}"
        elif mine[at][0].lstrip("_") != name.lstrip("_"):
            yield f"calls {name} {mine[at][0]}"
        elif optional and not mine[at][1]:
            yield f"needs {name}"
    keywords_only = zip(ours.args.kwonlyargs, ours.args.kw_defaults, strict=True)
    needed = [(argument.arg, default is not None) for argument, default in keywords_only]
    known = {argument.arg for argument in theirs.args.kwonlyargs}
    for name, optional in [*mine[len(others) :], *(one for one in needed if one[0] not in known)]:
        if not optional and theirs.args.kwarg is None:
            yield f"needs {name}, which nobody hands in"
    keywords = {argument.arg for argument in ours.args.kwonlyargs} | {name for name, _ in mine}
    for argument in theirs.args.kwonlyargs:
        if argument.arg not in keywords and ours.args.kwarg is None:
            yield f"does not take the keyword {argument.arg}"
    if theirs.args.kwarg is not None and ours.args.kwarg is None:
        yield "takes no further keywords"


def _parameters(function: Function) -> list[tuple[str, bool]]:
    """Names, and whether each may be left out."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    required = len(arguments) - len(function.args.defaults)
    found = [(argument.arg, at >= required) for at, argument in enumerate(arguments)]
    return [one for one in found if one[0] not in ("self", "cls")]


def derived(ours: ast.ClassDef, theirs: dict[str, Function]) -> Iterator[str]:
    """Where a class of ours cannot take the place of theirs: rules 2 and 3."""
    mine = methods_of(ours)
    for name, method in theirs.items():
        if name in mine and name != "__init__":
            yield from (f"{ours.name}.{name} {what}" for what in differences(mine[name], method))
        elif is_abstract(method) and name not in mine:
            yield f"{ours.name} lacks {name}"


def _is_protocol(wheel: Wheel, module: str, name: str) -> bool:
    _, node = wheel.find(module, name)
    return isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)


def imported(wheel: Wheel, file: Path, package: str) -> Iterator[tuple[str, str]]:
    """What a file imports of an engine: module and name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == package:
            yield from ((node.module, alias.name) for alias in node.names)


def written_down(tree: ast.Module) -> list[ast.ClassDef]:
    """The classes that a file has for a type checker only."""
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return [node for block in blocks for node in block.body if isinstance(node, ast.ClassDef)]


def compare_class(wheel: Wheel, ours: ast.ClassDef, module: str) -> Iterator[str]:
    """Where a class that is written down differs from the one that it is of: rule 4."""
    theirs, members = wheel.methods(module, ours.name), wheel.members(module, ours.name)
    for name, method in methods_of(ours).items():
        if name not in members:
            yield f"{ours.name} has no {name}"
        elif name in theirs:
            yield from (f"{ours.name}.{name} here {what}" for what in differences(theirs[name], method))
    for part in ours.body:
        if isinstance(part, ast.AnnAssign):
            yield from (f"{ours.name} has no {name}" for name in _names(part) if name not in members)


def compare(wheel: Wheel, package: str) -> Iterator[str]:
    """All that differs between our adapter of an engine and its released package."""
    for file in sorted((ADAPTERS / package).glob("*.py")):
        yield from (f"{file.relative_to(ROOT)}: {what}" for what in compare_imports(wheel, file, package))
    for path, ours, module, theirs in DERIVED:
        if module.partition(".")[0] == package:
            [node] = [one for one in _classes(ADAPTERS / path) if one.name == ours]
            yield from (f"{path}: {what}" for what in derived(node, wheel.methods(module, theirs)))
            if _is_protocol(wheel, module, theirs):
                mine = methods_of(node)
                needed = [name for name in wheel.methods(module, theirs) if not name.startswith("_")]
                yield from (f"{path}: {ours} lacks {name}" for name in needed if name not in mine)
    for path, module in STAND_INS.items():
        if module.partition(".")[0] == package:
            for node in _classes(ROOT / path):
                yield from (f"{path}: {what}" for what in compare_stand_in(wheel, node, module))


def compare_imports(wheel: Wheel, file: Path, package: str) -> Iterator[str]:
    """What a file imports that is not there, and where what it writes down of that differs: rules 1 and 4."""
    homes: dict[str, str] = {}
    for module, name in imported(wheel, file, package):
        try:
            home, node = wheel.find(module, name)
        except LookupError as error:
            yield f"{error}"
        else:
            if isinstance(node, ast.ClassDef):
                homes[name] = home
    for node in written_down(ast.parse(file.read_text())):
        if node.name in homes:
            yield from compare_class(wheel, node, homes[node.name])


def _classes(file: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]


def compare_stand_in(wheel: Wheel, ours: ast.ClassDef, module: str) -> Iterator[str]:
    """A stand-in takes what the real one takes, and no more; and has as much that is abstract."""
    yield from compare_class(wheel, ours, module)
    theirs = wheel.methods(module, ours.name)
    for name, method in methods_of(ours).items():
        if name in theirs:
            yield from (f"{ours.name}.{name} {what}" for what in differences(method, theirs[name]))
            if is_abstract(method) != is_abstract(theirs[name]):
                yield f"{ours.name}.{name} is abstract in one of the two"
    yield from (
        f"{ours.name} lacks {name}" for name in theirs if is_abstract(theirs[name]) and name not in methods_of(ours)
    )


# --- wheels -----------------------------------------------------------------------------------------------------------


def requirements() -> dict[str, str]:
    """What noxfile.py installs of each engine."""
    constants = {
        name: ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.Assign)
        for name in _names(node)
        if name in ENGINES.values()
    }
    said = {package: constants[constant] for package, constant in ENGINES.items()}
    return {package: value if isinstance(value, str) else value[0] for package, value in said.items()}


def fetch(requirement: str, folder: Path) -> None:
    """Download a wheel, without what it depends on.

    Raises:
        OSError: it could not be had.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines() or ["?"]
        raise OSError(f"{requirement} could not be fetched: {said[-1]}")


def wheel_of(requirement: str, folder: Path) -> Wheel:
    """The wheel of a requirement in a folder.

    Raises:
        OSError: it is not there.
    """
    name, _, version = requirement.partition("==")
    stem = re.sub(r"[-_.]+", "_", name).lower()
    found = [path for path in folder.glob("*.whl") if path.name.lower().startswith(f"{stem}-{version}-")]
    if not found:
        raise OSError(f"there is no wheel of {requirement} in {folder}")
    return Wheel(found[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheels", type=Path, help="a folder of wheels that were fetched before")
    given = parser.parse_args().wheels
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for package, requirement in requirements().items():
            try:
                if given is None:
                    fetch(requirement, Path(scratch))
                wheel = wheel_of(requirement, given or Path(scratch))
            except OSError as error:
                print(f"nothing was compared: {error}", file=sys.stderr)
                return 2
            try:
                found = list(dict.fromkeys(compare(wheel, package)))
            except LookupError as error:  # a whole module or class is gone
                found = [f"{error}"]
            print(f"{requirement}: {len(found) or 'no'} differences")
            for what in found:
                print(f"  {what}")
            failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
