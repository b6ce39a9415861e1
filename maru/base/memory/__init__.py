"""A region in this address space."""
