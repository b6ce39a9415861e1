"""The client: what a handler does (pure generators), who drives it in trio and in threads, and its two faces."""
