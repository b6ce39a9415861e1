"""Every knob of a host, with its default, its bound and its reason."""

from __future__ import annotations

import math

import attrs

from .finding import check_names


def _seconds(instance: object, attribute: attrs.Attribute[float], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{attribute.name} is {value!r}, but must be a positive number of seconds")


def _count(instance: object, attribute: attrs.Attribute[int | None], value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{attribute.name} is {value!r}, but must be a positive number of bytes, or None")


def _number(instance: object, attribute: attrs.Attribute[int], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{attribute.name} is {value!r}, but must be a positive integer")


def _flag(instance: object, attribute: attrs.Attribute[bool], value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{attribute.name} is {value!r}, but must be true or false")


@attrs.frozen(kw_only=True)
class HostConfig:
    """What a host may be told. :class:`ValueError` for what makes no sense."""

    capacity_bytes: int | None = attrs.field(default=None, validator=_count)
    """How many bytes of blocks this host lets the plugin keep. ``None``: the plugin knows; the host neither counts nor
    evicts."""
    checksums: bool = attrs.field(default=True, validator=_flag)
    """Keep an xxh3-64 of each block that is stored through this host, in the host's memory, and verify it at every load."""
    deadline: float = attrs.field(default=30.0, validator=_seconds)
    """Seconds for each answer. Less than a pipeline's ``transfer_timeout`` (60), so that the host says first what is
    unproven."""
    close_deadline: float = attrs.field(default=5.0, validator=_seconds)
    """Seconds at the end for answers that nobody waits for any more, and then as many for the plugin's ``close``."""
    rescue_interval: float = attrs.field(default=0.25, validator=_seconds)
    """Seconds after which answers are looked for although nobody was told of any. Each one found so is counted."""
    submit_in_thread: bool = attrs.field(default=False, validator=_flag)
    """Submit in a thread: for a plugin that blocks there, against its contract. Costs a thread switch for each operation."""
    most_known: int = attrs.field(default=262_144, validator=_number)
    """Without a capacity, so many blocks and their checksums are remembered (some 80 MB). A block that was forgotten is still
    found by asking; its bytes are not verified then, which is counted."""
    most_quarantined_bytes: int = attrs.field(default=1 << 30, validator=_number)
    """So much memory at most is left to a plugin that does not answer. Beyond it, nothing more is given to the plugin, and what
    would have been fails at once."""
    most_unanswered: int = attrs.field(default=1024, validator=_number)
    """So many operations at most are left to a plugin that does not answer, with or without memory. Beyond it, nothing more is
    asked, and what would have been fails at once."""


def host_config(knobs: dict[str, object]) -> HostConfig:
    """From a specification.

    Raises:
        TierParameterError: there is no such knob.
        ValueError: a value that makes no sense.
    """
    check_names("the host of a plugin", knobs, [field.name for field in attrs.fields(HostConfig)])
    return HostConfig(**knobs)  # type: ignore[arg-type]
