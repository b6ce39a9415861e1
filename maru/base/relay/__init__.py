"""A child process that accepts and relays TCP connections without keys.

It reads their handshakes before the server sees them.
"""
