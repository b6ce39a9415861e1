"""The client: operations as pure generators, their drivers, and two handlers.

One driver and handler is for trio, the other for threads.
"""
