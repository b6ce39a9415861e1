"""The client's core: every operation as a generator, which asks for what it needs and never waits itself. Pure.

One file per idea: connecting (and coming back), storing, reclaiming, reading, deleting. `_standing` is the state they share,
`_effects` what they ask for; what drives them is a face (`_client`, `_blocking`).
"""

from ._connecting import beat as beat
from ._connecting import close as close
from ._connecting import connect as connect
from ._connecting import forget_regions as forget_regions
from ._connecting import give_back_pins as give_back_pins
from ._connecting import settle as settle
from ._connecting import span_of as span_of
from ._deleting import delete as delete
from ._effects import Alone as Alone
from ._effects import Call as Call
from ._effects import Effect as Effect
from ._effects import Map as Map
from ._effects import Operation as Operation
from ._effects import Span as Span
from ._effects import Start as Start
from ._effects import Work as Work
from ._pinned import Pin as Pin
from ._reading import exist as exist
from ._reading import exists as exists
from ._reading import hold as hold
from ._reading import load as load
from ._reading import pin as pin
from ._reading import release as release
from ._reading import simply as simply
from ._reading import unpin as unpin
from ._standing import Counters as Counters
from ._standing import Standing as Standing
from ._storing import addresses as addresses
from ._storing import allocate as allocate
from ._storing import put as put
from ._storing import restore as restore
from ._storing import store as store
