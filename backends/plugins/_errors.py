"""Exceptions of plugins. Each names who must act.

That is the author of the specification, or of the plugin. Three name a missing object and the place that was searched,
and derive from Python's own exceptions for it: ``ImportError``, ``AttributeError``, ``TypeError``. The author of the
specification must act. The others are raised for a plugin at work: its author must act.
"""

from __future__ import annotations

from collections.abc import Sequence

from maru.base.errors import KnobError

from .._errors import BackendError


class PluginModuleError(BackendError, ImportError):
    """The module of a plugin cannot be imported."""

    def __init__(self, module_path: str, why: BaseException) -> None:
        super().__init__(f"module {module_path!r} cannot be imported: {why}")
        self.module_path = module_path


class PluginClassError(BackendError, AttributeError):
    """A name that its module does not have."""

    def __init__(self, module_path: str, name: str, what: str) -> None:
        super().__init__(f"module {module_path!r} has no {name!r}, which was looked for as {what}")
        self.module_path = module_path
        self.looked_for = name


class PluginTypeError(BackendError, TypeError):
    """An object that the specification cannot use.

    It is not of the needed kind, or cannot be called as a plugin.
    """


class TierParameterError(PluginTypeError, ValueError):
    """A parameter of a tier that is missing, unknown or wrong.

    Attributes:
        tier: the kind of tier.
        parameter: the parameter.
        value: its value; ``None`` if it is missing.
        why: the requirement, or the most similar name.
    """

    def __init__(self, tier: str, parameter: str, value: object, why: str) -> None:
        super().__init__(f"{tier}: {parameter} = {value!r}: {why}")
        self.tier: str = tier
        self.parameter: str = parameter
        self.value: object = value
        self.why: str = why


class UnknownTier(BackendError, LookupError):
    """A name that no kind of tier has.

    The text lists the names, and the places that were searched.
    """

    def __init__(self, name: str, known: Sequence[str], group: str) -> None:
        super().__init__(
            f"no kind of tier is named {name!r}: there are {', '.join(known)}; "
            f"entry points of the group {group!r} and lazily registered modules were looked at, too"
        )
        self.looked_for = name


class PluginFault(BackendError):
    """A failure of the plugin, or a break of its contract.

    The text describes it.
    """


class NoAnswer(BackendError):
    """A plugin that did not answer within its deadline.

    Whether the operation took place is unknown: this is no miss.
    """


class HostConfigError(BackendError, KnobError):
    """A value of a host's knob that is out of range.

    The text names the knob, the value, and the bound.
    """
