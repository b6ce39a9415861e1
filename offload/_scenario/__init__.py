"""What the commands ``offload scenario ...`` do, one module a command."""
