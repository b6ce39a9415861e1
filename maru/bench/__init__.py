"""``maru bench``: costs of the page store, next to their limits.

Also the measurement and the tables of all benches in this project.
"""

from ._command import command as command
