"""``offload replay``: what is asked for, laps, a clock that skips, the playing, what comes of it, the command."""
