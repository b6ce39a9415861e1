"""Entry point of ``python -m maru.bench``, which is ``maru bench``."""

from ._command import command

command(prog_name="maru bench")
