"""Status of an engine: a web page, a terminal screen, views.

The page and the screen show the views. The page needs the extra ``status``. Names are imported when they are first
used.
"""

from typing import TYPE_CHECKING

from maru.base.lazy import lazily

if TYPE_CHECKING:
    from ._source import EngineStatus as EngineStatus
    from ._server import serve_status as serve_status
    from ._client import fetch_view as fetch_view
    from ._client import NoStatus as NoStatus
    from ._source import StatusSource as StatusSource
    from ._source import NoSuchKey as NoSuchKey
    from ._view import ViewMaker as ViewMaker
    from ._view import StatusView as StatusView
    from ._view import PipelineView as PipelineView
    from ._view import TierView as TierView
    from ._view import ContainerView as ContainerView
    from ._view import Rates as Rates
    from ._top import sheet as sheet

_HOMES = {
    "EngineStatus": "._source",
    "serve_status": "._server",
    "fetch_view": "._client",
    "NoStatus": "._client",
    "StatusSource": "._source",
    "NoSuchKey": "._source",
    "ViewMaker": "._view",
    "StatusView": "._view",
    "PipelineView": "._view",
    "TierView": "._view",
    "ContainerView": "._view",
    "Rates": "._view",
    "sheet": "._top",
}

lazily(__name__, _HOMES)
