"""The server: a pure service that decides replies, and its loops."""
