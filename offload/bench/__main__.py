"""``python -m offload.bench``, the same as ``offload bench``."""

from ._command import command

command(prog_name="offload bench")
