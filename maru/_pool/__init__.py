"""Regions of memory that other processes map: their backing, their state directory, and how descriptors are handed out."""
