"""KV events: changes of stored keys, published for routers.

They have vLLM's format. Mirrors follow them, and know when they may be out of date.

A publisher reports the keys of its books::

    async with publish_events({"host": tier}, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"):
        ...

Any reader of vLLM's KV events can follow it. A mirror also detects a restart, a silence and a gap that is not kept any
more::

    async with open_mirror("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558") as mirror:
        await mirror.wait_current()
        mirror.prefix(block_hashes)
"""

from typing import TYPE_CHECKING

from ..base.lazy import lazily

if TYPE_CHECKING:
    from ._books import KeyBook as KeyBook
    from ._books import KeyList as KeyList
    from ._books import KeyWatcher as KeyWatcher
    from ._books import KeyWatchers as KeyWatchers
    from ._books import TranslatedBook as TranslatedBook
    from ._books import list_lazily as list_lazily
    from ._messages import BadEvent as BadEvent
    from ._messages import BlockHash as BlockHash
    from ._mirror import Mirror as Mirror
    from ._mirror import MirrorStatistics as MirrorStatistics
    from ._publisher import EventPublisher as EventPublisher
    from ._publisher import PublisherStatistics as PublisherStatistics
    from ._publisher import open_publisher as open_publisher
    from ._publisher import publish_events as publish_events
    from ._subscriber import EventMirror as EventMirror
    from ._subscriber import open_mirror as open_mirror

_HOMES = {
    "KeyBook": "._books",
    "KeyList": "._books",
    "KeyWatcher": "._books",
    "KeyWatchers": "._books",
    "TranslatedBook": "._books",
    "list_lazily": "._books",
    "BadEvent": "._messages",
    "BlockHash": "._messages",
    "Mirror": "._mirror",
    "MirrorStatistics": "._mirror",
    "EventPublisher": "._publisher",
    "PublisherStatistics": "._publisher",
    "open_publisher": "._publisher",
    "publish_events": "._publisher",
    "EventMirror": "._subscriber",
    "open_mirror": "._subscriber",
}

lazily(__name__, _HOMES)
