"""Memory regions that other processes map.

With their backing, their state directory, and how descriptors are handed out.
"""
