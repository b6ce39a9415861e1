"""The server: what every message means (pure), and the loops around it."""
