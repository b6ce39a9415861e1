"""Settings of a host, each with its default, bound and reason."""

# the functions called in the class bodies make fields
from __future__ import annotations

from typing import Final

import attrs

from maru.configuration import Knobs

from ._errors import HostConfigError
from .finding import check_names

_DAY = 86_400.0

_knob: Final = Knobs("OFFLOAD", HostConfigError)


@attrs.frozen(kw_only=True)
class HostConfig:
    """The settings of a plugin's host.

    A value out of range is a :class:`HostConfigError`.
    """

    capacity_bytes: int | None = _knob.optional(
        None,
        1,
        1 << 50,
        "How many bytes of blocks this host lets the plugin keep. None: the plugin knows; the host neither counts nor evicts.",
    )
    """Most bytes of blocks that the host lets the plugin keep.

    ``None``: the plugin knows; the host neither counts nor evicts.
    """
    checksums: bool = _knob.flag(True, "An xxh3-64 of each block costs 8 bytes and a tenth of a copy.")
    """Whether to sum each stored block and verify it at every load.

    The xxh3-64 is kept in the host's memory.
    """
    deadline: float = _knob.seconds(
        30.0, 0.001, _DAY, "Less than a pipeline's transfer_timeout (60), so that the host says first what is unproven."
    )
    """Seconds for each answer.

    Less than a pipeline's ``transfer_timeout`` (60), so that the host is the first to report an unproven copy.
    """
    close_deadline: float = _knob.seconds(
        5.0, 0.001, _DAY, "At the end no call waits for the answers: a plugin that hangs delays the exit by twice this."
    )
    """Seconds at the end for answers that no call awaits.

    Then as many for the plugin's ``close``.
    """
    rescue_interval: float = _knob.seconds(
        0.25, 0.001, _DAY, "A signal that a plugin forgot costs this much latency; looking costs some microseconds."
    )
    """Seconds after which answers are looked for without a signal.

    Each answer found in this way is counted.
    """
    submit_in_thread: bool = _knob.flag(False, "Costs a thread switch for each operation.")
    """Whether to submit in a thread.

    For a plugin that blocks there, against its contract. Costs a thread switch for each operation.
    """
    cache_salts: bool = _knob.flag(False, "Costs some 200 bytes for each block of a tenant that has a name.")
    """Whether to pass a block's tenant as its key's salt.

    For a plugin that places blocks by it.
    """
    most_known: int = _knob.integer(262_144, 1, 1 << 40, "Some 300 bytes each, 80 MB in all.")
    """Most blocks that are remembered without a capacity.

    With their checksums, some 80 MB. A block that was forgotten is still found by asking; its bytes are not verified
    then, which is counted.
    """
    most_quarantined_bytes: int = _knob.integer(
        1 << 30, 1, 1 << 50, "A plugin that hangs keeps the memory it was given: bounded, or it keeps all there is."
    )
    """Most bytes that are left to a plugin that does not answer.

    Beyond it, the plugin gets no memory any more, and operations that need some fail at once.
    """
    most_unanswered: int = _knob.integer(1024, 1, 1 << 30, "Each is remembered until it is answered.")
    """Most operations that are left to a plugin that does not answer.

    With or without memory. Beyond it, nothing more is asked, and further operations fail at once.
    """


def host_config(knobs: dict[str, object]) -> HostConfig:
    """Return the configuration of a host from a specification.

    Raises:
        TierParameterError: there is no such knob.
        HostConfigError: a value out of its bound.
    """
    check_names("the host of a plugin", knobs, [field.name for field in attrs.fields(HostConfig)])
    return HostConfig(**knobs)  # type: ignore[arg-type]
