"""TCP without keys: a process of its own that takes connections, reads their handshakes, and relays what follows."""
