"""Regions of memory that other processes map: what they are made of, whose directory they lie in, how they are handed over."""
