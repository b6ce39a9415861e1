"""Operations of a client as generators, which never wait themselves. Pure.

They yield the effects that they need. One file per idea: connecting (and coming back), pinning, storing, reclaiming,
reading, deleting. `state` is the state they share, `effects` are their requests; a face drives them (`handler`,
`blocking`).
"""

from .board_pins import BoardCounters as BoardCounters
from .board_pins import BoardPins as BoardPins
from .connecting import beat as beat
from .connecting import close as close
from .connecting import connect as connect
from .connecting import forget_regions as forget_regions
from .connecting import settle as settle
from .connecting import span_of as span_of
from .deleting import delete as delete
from .listing import Listing as Listing
from .listing import list_page as list_page
from .effects import Alone as Alone
from .effects import Call as Call
from .effects import Effect as Effect
from .effects import Identify as Identify
from .effects import Map as Map
from .effects import MapIndex as MapIndex
from .effects import Operation as Operation
from .effects import Span as Span
from .effects import Work as Work
from .indexed import exist_nowait as exist_nowait
from .indexed import hold_nowait as hold_nowait
from .pinned import Pin as Pin
from .pinning import give_back_pins as give_back_pins
from .reading import exist as exist
from .reading import exists as exists
from .reading import hold as hold
from .reading import hold_first as hold_first
from .reading import load as load
from .reading import pin as pin
from .reading import release as release
from .reading import simply as simply
from .reading import unpin as unpin
from .state import Counters as Counters
from .state import Shortfall as Shortfall
from .state import ClientState as ClientState
from .storing import addresses as addresses
from .storing import allocate as allocate
from .storing import allocate_most as allocate_most
from .storing import put as put
from .storing import restore as restore
from .storing import store as store
from .storing import store_surely as store_surely
from .storing import take_region as take_region
