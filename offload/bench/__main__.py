"""``python -m offload.bench`` is ``offload bench``."""

from ._command import command

command(prog_name="offload bench")
