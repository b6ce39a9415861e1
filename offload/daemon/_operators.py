"""The operators of the daemon: which connections have shown the token. Pure."""

from __future__ import annotations

import hmac

import attrs

from ._messages import Refusal


@attrs.define(eq=False)
class Operators:
    """Which connections have shown the token, and what each has under way."""

    token: bytes = attrs.field(repr=False)
    wrong: int = 0
    """Tokens that were none."""
    _admitted: set[bytes] = attrs.field(factory=set)
    _asking: set[bytes] = attrs.field(factory=set)

    def show(self, peer: bytes, token: bytes) -> bool:
        """Whether this is the token. Then its connection is admitted."""
        right = hmac.compare_digest(token, self.token)
        if right:
            self._admitted.add(peer)
        self.wrong += not right
        return right

    def begin(self, peer: bytes) -> None:
        """A connection asks for something.

        Raises:
            Refusal: it has not shown the token, or has something under way.
        """
        if peer not in self._admitted:
            raise Refusal("credential", "show the token of admin_token_file first")
        if peer in self._asking:
            raise Refusal("full", "one request at a time: the one before is not answered yet")
        self._asking.add(peer)

    def end(self, peer: bytes) -> None:
        """Its request is answered."""
        self._asking.discard(peer)

    def gone(self, peer: bytes) -> None:
        """The connection is over."""
        self._admitted.discard(peer)
        self._asking.discard(peer)

    def change(self, token: bytes) -> None:
        """From now on this is the token; connections have to show it, if it is another one."""
        if not hmac.compare_digest(token, self.token):
            self.token = token
            self._admitted.clear()
