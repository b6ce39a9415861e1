"""TCP without keys: a child process that accepts connections, reads their handshakes, and relays what follows."""
