"""Tools for testing what is built on this package, and this package itself.

Each is imported from its own module, so that one which needs torch (``reference_engine``) costs nothing to the others.
"""
