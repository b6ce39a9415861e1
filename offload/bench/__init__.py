"""``offload bench``: measures this package, each figure beside its limit in the same run."""

from ._command import command as command
