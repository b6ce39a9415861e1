"""Memory regions that other processes map.

The package has their backing, their state directory, and the hand-out of descriptors.
"""
