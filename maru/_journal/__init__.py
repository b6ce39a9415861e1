"""What must survive a server, written down before it is acknowledged, and read again when one starts."""
