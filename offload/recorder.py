"""The flight recorder, which keeps the decisions of the last minutes.

A user reads its file when something has gone wrong. :class:`FlightRecorder` is given to a pipeline or an engine as one
of its instruments; ``offload incident`` saves and prints its recording, and ``offload scenario from-incident`` makes a
scenario of it.
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
