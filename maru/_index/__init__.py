"""The shared index: where keys lie, in a file that the server writes and its clients on this host read. Pure.

A lookup in it is no message, and a load needs no pin: bytes are copied, and then the index is looked at again. What is to stay
is held by a board, which a client writes and the server looks at. Here is what stands in these files and in which order it is
written and read; who makes, hands out and maps them is elsewhere.
"""

from .board import BOARD_BYTES as BOARD_BYTES
from .board import BoardWriter as BoardWriter
from .board import header_of_board as header_of_board
from .boards import Boards as Boards
from .layout import MARK as MARK
from .layout import MIN_BYTES as MIN_BYTES
from .layout import NotAnIndex as NotAnIndex
from .layout import bytes_for as bytes_for
from .layout import tenant_of as tenant_of
from .reader import Found as Found
from .reader import IndexReader as IndexReader
from .tenants import TenantIndexes as TenantIndexes
from .writer import Entries as Entries
from .writer import IndexStatistics as IndexStatistics
from .writer import IndexWriter as IndexWriter
