"""What the pages ask of the format of scenario files: ``scenario-fields TABLE`` and ``scenario-faults``, from the classes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from offload.testing.scenarios import _program
from offload.testing.scenarios import _schema as schema

_TABLES = {cls.__name__: cls for cls in schema.PARTS}


class Fields(SphinxDirective):
    """Every field of a table of the file."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        _depend(self)
        rows = [
            [nodes.literal("", field.name), _words(_kind(field)), _code(field.default), _words(field.text)]
            for field in schema.described(_TABLES[self.arguments[0]])
        ]
        return [_table(("Field", "May be", "Without it", "What it means"), (16, 22, 12, 50), rows)]


class Faults(SphinxDirective):
    """Every kind of fault."""

    def run(self) -> list[nodes.Node]:
        _depend(self)
        rows = [[nodes.literal("", do), _words(what), _words(on)] for do, what, on in schema.fault_rows()]
        return [_table(("do", "What happens", "It looks at"), (16, 60, 24), rows)]


def _depend(directive: SphinxDirective) -> None:
    for module in (_program, schema):
        directive.env.note_dependency(str(module.__file__))


def _kind(field: schema.FieldDoc) -> str:
    kind = re.sub(r"\b([A-Z]\w+)\b", lambda match: f"a table ({match[1]})", field.kind)
    return f"{kind}, needed" if field.required else kind


def _code(text: str) -> nodes.Node:
    return nodes.literal("", text) if text else nodes.Text("")


def _words(text: str) -> nodes.Node:
    """A text with ``literals`` in it."""
    both = nodes.inline()
    for i, part in enumerate(text.replace("\\", "").split("``")):
        both += nodes.literal("", part) if i % 2 else nodes.Text(part)
    return both


def _table(titles: Iterable[str], widths: Iterable[int], rows: Iterable[list[nodes.Node]]) -> nodes.table:
    table = nodes.table("", classes=["knobs"])
    group = nodes.tgroup("", cols=len(tuple(titles)))
    table += group
    group += [nodes.colspec("", colwidth=width) for width in widths]
    head, body = nodes.thead(), nodes.tbody()
    group += [head, body]
    head += _row([nodes.Text(title) for title in titles])
    body += [_row(row) for row in rows]
    return table


def _row(cells: list[nodes.Node]) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        entry = nodes.entry()
        entry += nodes.paragraph("", "", cell)
        row += entry
    return row


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("scenario-fields", Fields)
    app.add_directive("scenario-faults", Faults)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
