"""The operators of the daemon: connections that have shown the token. Pure."""

from __future__ import annotations

import hmac

import attrs

from ._messages import Refusal


@attrs.define(eq=False)
class Operators:
    """The connections that have shown the token, and their running requests."""

    token: bytes = attrs.field(repr=False)
    wrong: int = 0
    """Number of wrong tokens."""
    _admitted: set[bytes] = attrs.field(factory=set)
    _asking: set[bytes] = attrs.field(factory=set)

    def show(self, peer: bytes, token: bytes) -> bool:
        """Return whether this is the token. Admits its connection then."""
        right = hmac.compare_digest(token, self.token)
        if right:
            self._admitted.add(peer)
        self.wrong += not right
        return right

    def begin(self, peer: bytes) -> None:
        """Begin the request of a connection.

        Raises:
            Refusal: it has not shown the token, or has a running request.
        """
        if peer not in self._admitted:
            raise Refusal("credential", "send the token of admin_token_file first")
        if peer in self._asking:
            raise Refusal("full", "one request at a time: the previous one is not answered yet")
        self._asking.add(peer)

    def end(self, peer: bytes) -> None:
        """End the request of a connection."""
        self._asking.discard(peer)

    def gone(self, peer: bytes) -> None:
        """Forget a connection that is over."""
        self._admitted.discard(peer)
        self._asking.discard(peer)

    def change(self, token: bytes) -> None:
        """Set the token. Connections have to show a new one."""
        if not hmac.compare_digest(token, self.token):
            self.token = token
            self._admitted.clear()
