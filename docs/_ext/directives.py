"""What the pages ask of the code: pictures of its tables and packages, tables of its knobs; for the reference, ``public``.

Also makes the docstrings readable for Sphinx where we write them for the reader of the file: a rule's lines hang below
its number, which reStructuredText takes for a quotation.
"""

from __future__ import annotations

import ast
import collections.abc
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, TypeGuard

import architecture
import chart
import drawing
from architecture import draw_architecture
from chart import draw_pages
from docutils import nodes
from drawing import arrows_of_gate, arrows_of_moves, draw_container_path, draw_table
from sphinx.application import Sphinx
from sphinx.ext.autodoc.mock import mock
from sphinx.util.docutils import SphinxDirective

import maru._config
from backends.pinned_pool import _config as _pinned_pool_config
from maru._client import page_states
from maru._config import MaruConfig, ServerConfig
from maru.configuration import Knob, as_size
from offload import _config
from offload._config import BreakerConfig, knobs
from offload._engine import config as _engine_config
from offload._engine import engine_knobs
from offload._pipeline import lifecycle
from offload._pipeline.lifecycle import GATE, MOVES
from offload.daemon import MESSAGES, daemon_knobs
from offload.daemon import _admin_messages as _daemon_admin_messages
from offload.daemon import _config as _daemon_config
from offload.daemon import _messages as _daemon_messages


def _picture(name: str, draw: Callable[[], str]) -> type[SphinxDirective]:
    class Picture(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            # The page is made anew when one of them changes.
            for module in (lifecycle, page_states, architecture, chart, drawing, sys.modules[__name__]):
                self.env.note_dependency(str(module.__file__))
            return [nodes.raw("", draw(), format="html")]

    return type(name, (Picture,), {})


def draw_moves() -> str:
    """The status of a handle."""
    return draw_table("The status of a handle", [status.name for status in MOVES], arrows_of_moves())


def draw_gate() -> str:
    """The commit gate."""
    return draw_table("The commit gate", [phase.name for phase in GATE], arrows_of_gate())


KNOBS: dict[str, Callable[[], Iterable[Knob]]] = {
    "pipeline": knobs,
    "breaker": lambda: knobs(BreakerConfig, section="engine.breaker"),
    "engine": lambda: [knob for knob in engine_knobs() if not knob.name.startswith("engine.pipeline.")],
    "server": lambda: maru._config.knobs(ServerConfig, section="server"),
    "client": lambda: maru._config.knobs(MaruConfig, section="client"),
    "pinned_pool": _pinned_pool_config.knobs,
    "daemon": daemon_knobs,
}
"""By the table of a file that they are in."""


class Knobs(SphinxDirective):
    """A table of every knob, made from the declarations themselves: those of the pipeline, or of the section that is named."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        for module in (_config, _engine_config, maru._config, _pinned_pool_config, _daemon_config):
            self.env.note_dependency(str(module.__file__))
        section = self.arguments[0] if self.arguments else "pipeline"
        titles = ("Knob", "Default", "Must be", "What it does, and why so; its variable")
        rows = [
            [
                nodes.literal("", knob.name.removeprefix(f"{section}.")),
                nodes.literal("", default_of(knob)),
                nodes.Text(knob.bound),
                _reason(knob),
            ]
            for knob in KNOBS[section]()
        ]
        return [_table(titles, (26, 10, 22, 42), rows)]


class Messages(SphinxDirective):
    """The table of a daemon's messages, of engines or of operators, made from the table that both sides dispatch by."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        of_operators = self.arguments == ["operators"]
        self.env.note_dependency(str((_daemon_admin_messages if of_operators else _daemon_messages).__file__))
        rows: list[list[nodes.Node]] = [
            [
                nodes.Text(str(kind.code)),
                nodes.literal("", kind.name),
                nodes.literal("", ", ".join(kind.request.__struct_fields__[1:])),
                nodes.literal("", ", ".join(kind.answer.__struct_fields__[2:])),
                nodes.Text(kind.purpose),
            ]
            for kind in (_daemon_admin_messages.ADMIN_MESSAGES if of_operators else MESSAGES)
        ]
        return [_table(("Code", "Name", "Asks with", "Is answered with", "What for"), (6, 16, 24, 24, 30), rows)]


def _table(titles: Sequence[str], widths: Sequence[int], rows: Sequence[list[nodes.Node]]) -> nodes.table:
    table = nodes.table("", classes=["knobs"])
    group = nodes.tgroup("", cols=len(titles))
    table += group
    group += [nodes.colspec("", colwidth=width) for width in widths]
    head, body = nodes.thead(), nodes.tbody()
    group += [head, body]
    head += _row([nodes.Text(title) for title in titles])
    for row in rows:
        body += _row(row)
    return table


def default_of(knob: Knob) -> str:
    """As somebody would write it into a file."""
    default = knob.default
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int) and knob.bound.startswith("bytes"):
        return as_size(default)
    return "" if default == () else str(default)


def _row(cells: list[nodes.Node]) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        entry = nodes.entry()
        entry += nodes.paragraph("", "", cell)
        row += entry
    return row


def _reason(knob: Knob) -> nodes.Node:
    both = nodes.inline()
    both += [nodes.Text(knob.reason + " "), nodes.literal("", knob.variable, classes=["variable"])]
    return both


class Public(SphinxDirective):
    """Everything a module makes public: what it defines, and what it imports under an explicit ``as``.

    Each thing is described in one place. What belongs to another public module, or is a name of the whole package, is only
    pointed to.
    """

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        module = importlib.import_module(name)
        self.env.note_dependency(str(module.__file__))
        lines = [f".. automodule:: {name}", "   :no-members:", ""]
        elsewhere: list[str] = []
        for member, origin, there in public_names(ast.parse(Path(str(module.__file__)).read_text())):
            with mock(self.config.autodoc_mock_imports):  # what an adapter imports is its inference engine's
                thing = getattr(module, member)
            package = name.rpartition(".")[0]
            home = origin and importlib.util.resolve_name(origin, str(module.__package__))
            in_package = package and getattr(importlib.import_module(package), member, None) is thing
            if in_package and origin and not _comes_from(package, member, name):
                elsewhere.append(f"``{member}`` (:py:obj:`{package}.{member}`)")
            elif home and not home.rpartition(".")[2].startswith("_"):
                elsewhere.append(f"``{member}`` (:py:obj:`{home}.{there}`)")
            else:
                lines += [f".. auto{_kind(thing)}:: {name}.{member}"]
                lines += ["   :inherited-members:"] if _stands_on_what_is_private(thing) else []
                # Or else every Sequence in a signature would lead to the one of the reference engine.
                lines += ["   :no-index:"] if hasattr(collections.abc, member) else []
                lines += [""]
        if elsewhere:
            lines += ["Also here, and described there: " + ", ".join(elsewhere) + "."]
        return self.parse_text_to_nodes("\n".join(lines))


def _comes_from(package: str, member: str, module: str) -> bool:
    """Whether a package has this name from that module, and points there itself."""
    text = Path(str(importlib.import_module(package).__file__)).read_text()
    found = [origin for name, origin, _ in public_names(ast.parse(text)) if name == member and origin]
    return any(importlib.util.resolve_name(origin, package) == module for origin in found)


def _stands_on_what_is_private(thing: object) -> bool:
    """Whether a base of a class of ours is in no public module: what that one can do is described with the class."""
    if not isinstance(thing, type) or issubclass(thing, BaseException):
        return False
    root = thing.__module__.partition(".")[0]
    return any(base.__module__.partition(".")[0] == root and not _is_public(base) for base in thing.__mro__[1:])


def _is_public(thing: type) -> bool:
    package, _, module = thing.__module__.rpartition(".")
    return not module.startswith("_") or getattr(sys.modules[package], thing.__name__, None) is thing


def _kind(member: object) -> str:
    if isinstance(member, type):
        return "exception" if issubclass(member, BaseException) else "class"
    return "function" if isinstance(member, FunctionType) else "data"


def public_names(module: ast.Module) -> Iterator[tuple[str, str, str]]:
    """The public names of a module in the order of its text; of an imported one, also from where and as what.

    Constants only where a docstring follows.
    """
    seen = set[str]()
    body = [inner for one in module.body for inner in (one.body if _is_for_types(one) else [one])]
    for statement, next_one in zip(body, [*body[1:], None], strict=True):
        names: list[tuple[str, str, str]] = []
        match statement:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names = [(name, "", name)]
            case ast.ImportFrom(module=origin, names=imported, level=level):
                there = "." * level + (origin or "")
                names = [(alias.asname, there, alias.name) for alias in imported if alias.asname]
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names = [(name, "", name)] if _is_text(next_one) else []
        for found in names:
            if not found[0].startswith("_") and found[0] not in seen:
                seen.add(found[0])
                yield found


def _is_for_types(statement: ast.stmt) -> TypeGuard[ast.If]:
    """``if TYPE_CHECKING:``: what is in there is imported when it is asked for."""
    return (
        isinstance(statement, ast.If) and isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    )


def _is_text(statement: ast.stmt | None) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


_SECTIONS = {"Args:", "Returns:", "Raises:", "Attributes:"}
_AS_WRITTEN: dict[str, list[str]] = {}
_RULE = re.compile(r"(Rule|P)\s?\d+[.:] ")


def unhang(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """What is easy to read in the file, as reStructuredText that says the same.

    Each rule gets a paragraph of its own, whose lines begin where it begins. A drawing in a module's docstring is taken
    literally. What a function returns is not taken for a type where it has a colon.
    """
    changed: list[str] = []
    in_rule = False
    for line in lines:
        before = changed[-1] if changed else ""
        if _RULE.match(line):
            in_rule = True
            if before:
                changed.append("")
        elif not line.strip():
            in_rule = False
        elif what == "module" and line.startswith("    ") and not before and not in_rule and not _in_drawing(changed):
            changed += ["::", ""]
        elif before.strip() == "Returns:":
            line = f"{line[: len(line) - len(line.lstrip())]}: {line.lstrip()}"
        changed.append(line.strip() if in_rule else line)
    lines[:] = changed
    if what in ("attribute", "data", "property"):
        _AS_WRITTEN[name] = changed


def _in_drawing(lines: list[str]) -> bool:
    """Whether the last line with text is one of a drawing, or announces one."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    return last.startswith("    ") or last.rstrip().endswith("::")


def undo(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Where napoleon took what stands before a colon in the line below an attribute for its type: as it was written."""
    written = _AS_WRITTEN.pop(name, None)
    if written is not None and not _SECTIONS.intersection(map(str.strip, written)):
        lines[:] = written


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("status-moves", _picture("StatusMoves", draw_moves))
    app.add_directive("commit-gate", _picture("CommitGate", draw_gate))
    app.add_directive("page-moves", _picture("PageMoves", draw_pages))
    app.add_directive("container-path", _picture("ContainerPath", draw_container_path))
    app.add_directive("packages", _picture("Packages", draw_architecture))
    app.add_directive("knobs", Knobs)
    app.add_directive("messages", Messages)
    app.setup_extension("sphinx.ext.autodoc")
    app.add_directive("public", Public)
    app.connect("autodoc-process-docstring", unhang, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", undo, priority=600)  # and after it
    return {"parallel_read_safe": True, "parallel_write_safe": True}
