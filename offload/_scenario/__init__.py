"""The commands ``offload scenario ...``, one module for each."""
