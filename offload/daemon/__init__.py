"""The daemon of a host, which serves inference engines in other processes.

It owns the tiers and pipelines, and is started with ``offload serve``. Blocks outlive the engines that stored them. An
engine connects by :mod:`offload.client`.

Where to find things: ``_messages`` are the messages of both sides, ``_sessions`` the state of an engine and the order
in which it is given back, ``_memory`` reads and writes the memory of engines, ``_service`` handles each message,
``_stores`` those that store, ``_reads`` those that read, ``_pages`` those about pages that engines write themselves,
``_onward`` passes such pages on to further tiers, ``_server`` has the tasks, ``_events`` publishes events for routers,
``_command`` is the command.

The messages of operators are in ``_admin_messages``, their handlers in ``_admin``; their commands are
``_operator_commands``.
"""

from typing import TYPE_CHECKING

from maru.base.lazy import lazily

if TYPE_CHECKING:
    from ._server import open_daemon as open_daemon
    from ._server import Daemon as Daemon
    from ._server import DaemonInUse as DaemonInUse
    from ._dropped import Dropped as Dropped
    from ._engine import CannotOpen as CannotOpen
    from ._config import DaemonConfig as DaemonConfig
    from ._config import daemon_config as daemon_config
    from ._config import daemon_knobs as daemon_knobs
    from ._config import default_url as default_url
    from ._event_names import event_name as event_name
    from ._messages import MESSAGES as MESSAGES
    from ._admin_messages import ADMIN_MESSAGES as ADMIN_MESSAGES

_HOMES = {
    "open_daemon": "._server",
    "Daemon": "._server",
    "DaemonInUse": "._server",
    "Dropped": "._dropped",
    "CannotOpen": "._engine",
    "DaemonConfig": "._config",
    "daemon_config": "._config",
    "daemon_knobs": "._config",
    "default_url": "._config",
    "event_name": "._event_names",
    "MESSAGES": "._messages",
    "ADMIN_MESSAGES": "._admin_messages",
}

lazily(__name__, _HOMES)
