"""Shared index of key locations, read by clients on the server's host.

Pure. The server writes it to a file. A lookup in it is no message, and a load needs no pin: bytes are copied, and then
the index is checked again. Keys that must stay are held by a board, which a client writes and the server reads. This
package has the layout of these files and the order of reads and writes; other modules make, hand out and map them.
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
