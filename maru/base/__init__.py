"""Shared by the three packages: files, processes, memory, sockets, errors, output. Not for users: names may change."""
