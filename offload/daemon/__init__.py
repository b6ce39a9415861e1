"""The daemon of a host: owns the tiers and pipelines, and serves inference engines in other processes (``offload serve``).

Blocks outlive the engines that stored them. An engine comes by :mod:`offload.client`.

To read it: ``_messages`` is what both sides say, ``_sessions`` what an engine holds and the order in which it is given back,
``_memory`` how the memory of engines is read and written, ``_service`` what is done for each message, ``_stores`` for those
that store, ``_reads`` for those that read, ``_pages`` for pages that engines write themselves, ``_onward`` for
where these go on to, ``_server`` the tasks around it, ``_events`` what routers are told, ``_command`` the command.

What operators say is in ``_admin_messages``, what is done for it in ``_admin``; their commands are ``_operator_commands``.
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
