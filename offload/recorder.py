"""The flight recorder: keeps the last minutes of decisions, for the day on which something goes wrong.

:class:`FlightRecorder` is given to a pipeline or an engine as one of its instruments; ``offload incident`` saves and prints
what it has written, and ``offload scenario from-incident`` makes a scenario of it.
"""

from ._errors import IncidentError as IncidentError
from ._errors import NotARecording as NotARecording
from ._errors import RecorderBusy as RecorderBusy
from ._errors import RecordingTruncated as RecordingTruncated
from ._errors import RecordingVersion as RecordingVersion
from ._recorder.flight import FlightRecorder as FlightRecorder
from ._recorder.flight import RecorderStatistics as RecorderStatistics
from ._recorder.recording import Entry as Entry
from ._recorder.recording import Recording as Recording
from ._recorder.recording import read_ring as read_ring
