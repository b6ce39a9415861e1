"""``offload bench``: figures of this package, each next to its limit.

Both are measured in the same run.
"""

from ._command import command as command
