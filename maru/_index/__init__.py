"""The shared index: where keys lie, in a file that the server writes and its clients on this host read. Pure.

A lookup in it is no message, and a load needs no pin: bytes are copied, and then the index is looked at again. Here is what
stands in the file and in which order it is written and read; who makes, hands out and maps the file is elsewhere.
"""

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
