"""Parts of tiers, for their authors; the contract is :mod:`backends.abc`."""
