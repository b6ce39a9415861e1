"""One run in virtual time, and the systems that can be run so."""
