"""The commands of ``maru``, one file each, and their common code.

The common code sends requests to a server, and shows the answers.
"""
