"""The directory's journal: changes, written before they are acknowledged.

A start recovers the directory from it.
"""
