"""Regions in this process's address space."""
