"""Real runs: memory, files, page stores, processes and the wall clock, and systems of asyncio or threads."""

from __future__ import annotations
