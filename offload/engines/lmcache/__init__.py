"""LMCache's second level (L2) in any tier."""

from ._names import object_key_to_string as object_key_to_string
