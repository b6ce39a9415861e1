"""The architecture as a picture: what is in each package, and which package imports which, both read from the files.

A box is a sub-package, with how many modules it has; below the boxes stand the modules of the package itself. An arrow leads
from a package to one that it imports at run time, and says how many of its modules do.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from drawing import escape, svg, text

ROOT = Path(__file__).parents[2]
PACKAGES = ("offload", "backends", "maru")
"""From the one that decides to the one that all others stand on."""

WIDTH, MARGIN = 800, 16
BOX_WIDTH, BOX_HEIGHT, GAP = 144, 34, 10
HEAD, LINE, BETWEEN = 34, 18, 46
LETTERS = 104
"""How many letters of the names of modules fit on a line."""


def parts_of(package: str, root: Path = ROOT) -> tuple[dict[str, int], list[str]]:
    """The sub-packages of a package with their numbers of modules, and its own modules, by name."""
    children = sorted((root / package).iterdir())
    inner = {child.name: len(list(child.rglob("*.py"))) for child in children if (child / "__init__.py").exists()}
    return inner, [child.stem for child in children if child.suffix == ".py" and not child.stem.startswith("__")]


def imports_of(package: str, root: Path = ROOT) -> dict[str, int]:
    """How many modules of a package import each of the others at run time."""
    counts = dict.fromkeys(PACKAGES, 0)
    for file in (root / package).rglob("*.py"):
        for other in set(_imported(ast.parse(file.read_text()))) & set(PACKAGES) - {package}:
            counts[other] += 1
    return {other: count for other, count in counts.items() if count}


def _imported(tree: ast.AST) -> Iterator[str]:
    """The first names of all absolute imports, but for those that are there for annotations alone."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]
        yield from _imported(node)


def draw_architecture(root: Path = ROOT) -> str:
    """The packages from top to bottom, what is in each, and the arrows of their imports."""
    drawn: list[str] = []
    bands: dict[str, tuple[float, float]] = {}
    y = float(MARGIN)
    for package in PACKAGES:
        below, parts = _draw_package(package, y, *parts_of(package, root))
        drawn += parts
        bands[package] = (y, below)
        y = below + BETWEEN
    arrows = {package: imports_of(package, root) for package in PACKAGES}
    drawn += _draw_arrows(bands, arrows)
    said = "; ".join(
        f"{package} imports {', '.join(others) or 'none of the others'}" for package, others in arrows.items()
    )
    return svg("The packages", said, WIDTH, y - BETWEEN + MARGIN, drawn)


def _draw_package(name: str, top: float, inner: Mapping[str, int], modules: Sequence[str]) -> tuple[float, list[str]]:
    columns = (WIDTH - 2 * MARGIN - GAP) // (BOX_WIDTH + GAP)
    parts = [text(MARGIN + 14, top + 22, name, "name start")]
    y = top + HEAD
    for at, (child, count) in enumerate(inner.items()):
        x, row = MARGIN + GAP + (at % columns) * (BOX_WIDTH + GAP), y + (at // columns) * (BOX_HEIGHT + GAP)
        parts.append(
            f'<g class="state plain" data-package="{name}.{child}"><rect x="{x}" y="{row:g}" width="{BOX_WIDTH}" '
            f'height="{BOX_HEIGHT}" rx="7"/>{text(x + BOX_WIDTH / 2, row + 22, f"{child}  {count}", "")}</g>'
        )
    y += -(-len(inner) // columns) * (BOX_HEIGHT + GAP)
    for line in _lines(modules):
        parts.append(text(MARGIN + 14, y + 14, line, "soft start"))
        y += LINE
    y += GAP
    frame = f'<rect x="{MARGIN}" y="{top:g}" width="{WIDTH - 2 * MARGIN}" height="{y - top:g}" rx="9"/>'
    return y, [f'<g class="room" data-package="{escape(name)}">{frame}</g>', *parts]


def _lines(names: Sequence[str]) -> list[str]:
    lines = [""]
    for name in names:
        if len(lines[-1]) + len(name) > LETTERS:
            lines.append("")
        lines[-1] += f"{', ' if lines[-1] else ''}{name}"
    return lines


def _draw_arrows(bands: Mapping[str, tuple[float, float]], arrows: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Between neighbours in the middle; past a package, at the right edge of the picture."""
    parts: list[str] = []
    for source, others in arrows.items():
        for target, count in others.items():
            is_next = PACKAGES.index(target) == PACKAGES.index(source) + 1
            x = WIDTH / 2 if is_next else WIDTH - 2
            start, end = (
                (bands[source][1], bands[target][0]) if is_next else (bands[source][0] + 14, bands[target][0] + 14)
            )
            edge = WIDTH - MARGIN
            line = (
                f"M {x:g} {start:g} L {x:g} {end:g}"
                if is_next
                else f"M {edge} {start:g} L {x} {start:g} L {x} {end:g} L {edge} {end:g}"
            )
            head = (
                f"{x - 5:g},{end - 8:g} {x + 5:g},{end - 8:g} {x:g},{end:g}"
                if is_next
                else f"{edge + 8},{end - 5:g} {edge + 8},{end + 5:g} {edge},{end:g}"
            )
            where = (
                (x + 12, (start + end) / 2 + 5, "label start") if is_next else (x - 22, (start + end) / 2, "label end")
            )
            parts.append(
                f'<g class="arrow plain" data-from="{source}" data-to="{target}"><path d="{line}"/><polygon points="{head}"/>'
                f"{text(where[0], where[1], f'{count} modules import it' if is_next else str(count), where[2])}</g>"
            )
    return parts
