"""``maru bench``: what the page store costs, beside a bare echo or memcpy; and how every bench here measures and shows."""

from ._command import command as command
