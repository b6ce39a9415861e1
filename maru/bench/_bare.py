"""A bare client: our codec over our blocking socket, and nothing else.

It is a published client for the server, unless it greets: then it has a session, and may use our own codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any

from .._wire import HEADER_BYTES, Code, ErrorReply, HandshakeRequest, decode_reply, read_header, request
from ..transport import BlockingDealer
from .processes import PATIENCE, BenchFailed


class Bare:
    """A client. A context manager."""

    def __init__(self, address: str) -> None:
        self._dealer = BlockingDealer(address)
        self._sequence = 0

    def ask(self, code: int, message: Any) -> Any:
        """Send one request, and return its answer."""
        self._send(code, message)
        return self._receive(code)

    def rate(
        self,
        code: int,
        messages: Sequence[Callable[[], Any]],
        window: int,
        is_right: Callable[[Any], bool],
        read: Callable[[Any], object] = id,
    ) -> float:
        """Measure requests per second, made one by one, ``window`` in flight.

        They are answered in their order.

        Args:
            code: code of all the requests.
            messages: functions that build the requests.
            window: requests in flight at once.
            is_right: whether an answer is the one to be measured; called with the last one, off the clock.
            read: called with every answer on the clock, for replies whose decoding is not finished.
        """
        start = perf_counter()
        for at, make in enumerate(messages):
            if at >= window:
                read(self._receive(code))
            self._send(code, make())
        for _ in messages[-window:]:
            answer = self._receive(code)
            read(answer)
        rate = len(messages) / (perf_counter() - start)
        if not is_right(answer):
            raise BenchFailed(f"code {code:#04x}: wrong answer: {str(answer)[:200]}")
        return rate

    def greet(self, lease: float) -> bytes:
        """Open a session that may be silent for ``lease`` seconds.

        Returns its token.
        """
        token: bytes = self.ask(Code.HANDSHAKE, HandshakeRequest(extensions=1, lease=lease)).session
        return token

    def _send(self, code: int, message: Any) -> None:
        self._sequence += 1
        if not self._dealer.send([b"", request(code, self._sequence, message)], PATIENCE):
            raise BenchFailed(f"code {code:#04x} could not be sent")

    def _receive(self, code: int) -> Any:
        frames = self._dealer.receive(PATIENCE)
        if frames is None:
            raise BenchFailed(f"no answer to code {code:#04x}")
        frame = frames[-1]
        header = read_header(frame)
        reply = decode_reply(code, memoryview(frame)[HEADER_BYTES : HEADER_BYTES + header.length])
        if isinstance(reply, ErrorReply):
            raise BenchFailed(f"code {code:#04x}: {reply.error}")
        return reply

    def close(self) -> None:
        """Close the socket."""
        self._dealer.close()

    def __enter__(self) -> Bare:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
