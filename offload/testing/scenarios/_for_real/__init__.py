"""The same run against real components, and systems of other colours."""
