"""``offload size``: memory that the KV cache of so many tokens takes.

``model`` computes it, ``command`` asks and prints.
"""
