"""``offload bench``: each figure of this package beside the limit it is judged by, measured in the same run."""

from ._command import command as command
