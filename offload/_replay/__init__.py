"""``offload replay``: trace reader, options, laps, a clock that skips idle time, player, report and command."""
