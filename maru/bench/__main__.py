"""``python -m maru.bench`` is ``maru bench``."""

from ._command import command

command(prog_name="maru bench")
