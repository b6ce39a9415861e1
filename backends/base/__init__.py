"""Parts that tiers are made of, for all tiers here and for authors of tiers. The contract is :mod:`backends.abc`."""
