"""Tools for testing this package and code built on it.

Each is imported from its own module, so that one which needs torch (``reference_engine``) costs nothing to the others.
"""
