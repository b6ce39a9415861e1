"""The world in virtual time: the seams, the users, and what goes wrong."""
