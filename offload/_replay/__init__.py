"""``offload replay``: plays request traces.

It has a trace reader, options, laps, a clock that skips idle time, a player, a report and the command.
"""
