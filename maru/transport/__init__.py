"""Messages between processes: ZeroMQ sockets, and same-host channels.

Only this package and `maru.bench.echo` import zmq.

A client of this host reaches its server over a channel (:func:`open_channel`, :class:`BlockingChannel`, served by a
:class:`ChannelServer`): a Unix socket that keeps packets apart, between processes of one user. All others speak ZeroMQ,
which is imported when one of its names is first used. The rest of this text is about ZeroMQ's sockets.

A socket of trio serves any number of tasks. A server takes batches::

    async with open_socket("router", bind=["tcp://127.0.0.1:5555"]) as socket:
        while True:
            for peer, *envelope, request in await socket.receive_batch():
                socket.send_nowait([peer, *envelope, answer(request)])

A client gets the messages in a callback, which delivers each to the task that expects it::

    def on_messages(batch):
        for *_, reply in batch:
            calls.pop(reply[:8]).deliver(reply)

    async with open_socket("dealer", connect=["tcp://127.0.0.1:5555"], on_messages=on_messages) as socket:
        calls[number] = expected = socket.expect()
        await socket.send([b"", number + request])
        reply = await expected.wait()

For every message: it is sent and received whole, in the order of its connection; if a send is cancelled, it was not
sent; if a wait is cancelled, it is there for the next one. Waiting messages are in ZeroMQ, bounded by
:class:`SocketOptions`; nothing is queued here. Two things are not bounded by ZeroMQ: the frames of one message that its
sender never ends, which are not seen before it is whole, and reports of connections while the event loop is blocked.

A wait that finds its message at once is not always a checkpoint, unlike trio's: it sees a cancellation, but the other
tasks of the loop have their turn every quarter of a millisecond only (`_waiting` has the gain from that).
``busy_poll=0.0`` and a reply that is not there yet make it one.
"""

from typing import TYPE_CHECKING

from ..base.lazy import lazily

if TYPE_CHECKING:
    from ._channel_client import open_channel as open_channel
    from ._channel_client import ChannelClient as ChannelClient
    from ._channel_blocking import BlockingChannel as BlockingChannel
    from ._channel_blocking import ChannelConnection as ChannelConnection
    from ._channel_server import ChannelServer as ChannelServer
    from ._channel_server import ChannelStatistics as ChannelStatistics
    from ._channel_server import is_channel_peer as is_channel_peer
    from ._opening import open_socket as open_socket
    from ._trio import TrioSocket as TrioSocket
    from ._trio import SocketKind as SocketKind
    from ._trio import SocketStatistics as SocketStatistics
    from ._waiting import Expected as Expected
    from ._frames import check_free as check_free
    from ._options import SocketOptions as SocketOptions
    from ._monitor import Link as Link
    from ._monitor import LinkEvent as LinkEvent
    from ._blocking import BlockingDealer as BlockingDealer
    from ._blocking import BlockingStatistics as BlockingStatistics
    from ._keys import CurveClient as CurveClient
    from ._keys import CurveServer as CurveServer
    from ._keys import KeyPair as KeyPair
    from ._keys import has_curve as has_curve
    from ._keys import load_key_pair as load_key_pair
    from ._keys import load_public_keys as load_public_keys
    from ._keys import new_key_pair as new_key_pair
    from ._keys import save_key_pair as save_key_pair
    from ._keys import save_public_key as save_public_key
    from ._contract import BlockingSocket as BlockingSocket
    from ._contract import Message as Message
    from ._contract import MessageSocket as MessageSocket
    from ._contract import OnLost as OnLost
    from ._contract import OnMessages as OnMessages
    from ._contract import OpenMessageSocket as OpenMessageSocket

_HOMES = {
    "open_channel": "._channel_client",
    "ChannelClient": "._channel_client",
    "BlockingChannel": "._channel_blocking",
    "ChannelConnection": "._channel_blocking",
    "ChannelServer": "._channel_server",
    "ChannelStatistics": "._channel_server",
    "is_channel_peer": "._channel_server",
    "open_socket": "._opening",
    "TrioSocket": "._trio",
    "SocketKind": "._trio",
    "SocketStatistics": "._trio",
    "Expected": "._waiting",
    "BlockingSocket": "._contract",
    "Message": "._contract",
    "check_free": "._frames",
    "SocketOptions": "._options",
    "Link": "._monitor",
    "LinkEvent": "._monitor",
    "BlockingDealer": "._blocking",
    "BlockingStatistics": "._blocking",
    "CurveClient": "._keys",
    "CurveServer": "._keys",
    "KeyPair": "._keys",
    "has_curve": "._keys",
    "load_key_pair": "._keys",
    "load_public_keys": "._keys",
    "new_key_pair": "._keys",
    "save_key_pair": "._keys",
    "save_public_key": "._keys",
    "MessageSocket": "._contract",
    "OnLost": "._contract",
    "OnMessages": "._contract",
    "OpenMessageSocket": "._contract",
}

lazily(__name__, _HOMES)
