"""Ready-made policies. A policy decides which blocks a pipeline stores.

A policy is any callable ``(keys) -> Reasons | Leased``, called once for all blocks of a container; it returns the
rejected keys only. A policy that must wait derives from :class:`offload.abc.AsyncPolicy` instead. :func:`AllOf` and
:func:`AnyOf` combine policies; an async member makes the combination async.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Final, TypeAlias, cast, overload

import attrs
import trio
from xxhash import xxh3_64_intdigest

from backends.abc import Tier, TransferExecutor

from ._errors import TierBehindFailed, TierUnavailable
from ._policy_thread import ThreadedPolicy
from .abc import AsyncPolicy, Key, Leased, Policy, Reasons

AnyPolicy: TypeAlias = "Policy | AsyncPolicy"
"""The items of ``policies=``."""

NOTHING_REJECTED: Final[Reasons] = MappingProxyType({})
"""The answer that rejects nothing, shared by all policies."""


class PassAll:
    """A policy that rejects nothing."""

    __slots__ = ()
    in_any_thread = True

    def __repr__(self) -> str:
        return "PassAll()"

    def __call__(self, keys: Sequence[Key]) -> Reasons:
        """Return no rejected key."""
        return NOTHING_REJECTED


# --- presence -----------------------------------------------------------------------------------------------------


def PresenceFilter(tier: TransferExecutor) -> Policy | AsyncPolicy:
    """Return a policy that rejects blocks which a tier already has.

    The reason is ``present``. If a tier is broken, or one of the tiers of a daemon does not answer, nothing is known
    and nothing is rejected: the tier decides when room is reserved in it.

    Args:
        tier: a tier of any kind. If it :attr:`answers at once <backends.abc.Capabilities.answers_at_once>`, the filter
            never waits; any other tier is asked by an :class:`~offload.abc.AsyncPolicy`.

    Raises:
        TypeError: it does not answer at once, and is no :class:`backends.abc.Tier` that could be asked.
    """
    if tier.capabilities.answers_at_once:
        return _PresentNow(tier)
    if not isinstance(tier, Tier):
        raise TypeError(f"tier = {tier!r}: must be a backends.abc.Tier")
    return _PresentWhenAsked(tier)


class _PresentNow:
    """The presence filter of a tier that has ``contains_nowait``."""

    __slots__ = ("_contains", "_tier")
    in_any_thread = True

    def __init__(self, tier: TransferExecutor) -> None:
        self._tier = tier
        self._contains = tier.contains_nowait

    def __repr__(self) -> str:
        return f"PresenceFilter({self._tier!r})"

    def __call__(self, keys: Sequence[Key]) -> Reasons:
        try:
            found = self._contains(keys)
        except TierUnavailable:
            return NOTHING_REJECTED
        return dict.fromkeys(found, "present") if found else NOTHING_REJECTED


class _PresentWhenAsked(AsyncPolicy):
    """The presence filter of a tier that must be awaited.

    A :class:`backends.base.direct.DirectTier` may answer without waiting.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def __repr__(self) -> str:
        return f"PresenceFilter({self._tier!r})"

    async def evaluate(self, keys: Sequence[Key]) -> Reasons:
        """Return the keys that the tier had when it was asked."""
        try:
            found = await self._tier.contains(keys)
        except (TierUnavailable, TierBehindFailed):  # one of several tiers behind this one: the others take the blocks
            return NOTHING_REJECTED
        return dict.fromkeys(found, "present") if found else NOTHING_REJECTED

    def evaluate_nowait(self, keys: Sequence[Key]) -> Reasons | None:
        """Return the keys that a shared index shows.

        ``None`` if there is no such index, or the index does not know.
        """
        # Read each time: a tier that comes late is another one by then. Behind a breaker it is the tier itself, since
        # an answer without a message shows nothing about the health of the server.
        direct = self._tier.direct
        found = None if direct is None else direct.contains_from_thread(keys)
        if found is None:
            return None
        return dict.fromkeys(found, "present") if found else NOTHING_REJECTED


# --- frequency ----------------------------------------------------------------------------------------------------

_CEILING = 255  # a counter is a byte
_HALF = bytes(count // 2 for count in range(_CEILING + 1))


class FrequencyFilter:
    """A policy that rejects blocks requested at most ``threshold`` times.

    The reason is ``infrequent``. Every call counts as one request of each of its keys, the present one included. After
    other policies in :func:`AllOf` it is called for, and so counts, only the blocks that these let through.

    Counts are kept in a count-min sketch: three rows of one-byte counters, of which a key owns one in each row. Its
    count is the least of the three: never less than its requests since the last aging, and more only if all three
    counters are shared with busier keys. Two refinements:

    * *Conservative update*: of a key's counters only those are raised that hold the least value. The count stays an
      upper bound, and keys requested once pollute far less.
    * *Aging*: after every ``window`` requests all counters are halved, so that blocks which were popular long ago are
      forgotten, and, a row being ``window`` wide, rows never fill up. A counter stops at 255, and half of that is as
      much as any threshold.

    Memory is ``3 * window`` bytes, whatever the number of keys. The hash is a fixed one: the same requests give the
    same answers in every process. Measured on a window of nothing but new keys: at the default threshold none passes
    wrongly, at 2 one in ten thousand, at 1 one in twelve (a fourth row would halve that, and cost a quarter more time).
    """

    __slots__ = ("_fresh", "_mask", "_rows", "threshold", "window")

    def __init__(self, threshold: int = 8, *, window: int = 1 << 18) -> None:
        """Start with all counters at zero.

        Args:
            threshold: 0 to 127; with 0 everything passes.
            window: requests between two agings, 1,024 to 16,777,216; rounded up to a power of two. About as many
                different keys can be distinguished.

        Raises:
            ValueError: out of these bounds.
        """
        if not 0 <= threshold <= _CEILING // 2:
            raise ValueError(f"threshold = {threshold!r}: must be from 0 to {_CEILING // 2}")
        if not 1 << 10 <= window <= 1 << 24:
            raise ValueError(f"window = {window!r}: must be from {1 << 10} to {1 << 24}")
        self.threshold: int = threshold
        self.window: int = 1 << (window - 1).bit_length()
        self._mask = self.window - 1
        self._rows = (bytearray(self.window), bytearray(self.window), bytearray(self.window))
        self._fresh = 0

    def __repr__(self) -> str:
        return f"FrequencyFilter({self.threshold}, window={self.window})"

    def __call__(self, keys: Sequence[Key]) -> Reasons:
        """Count each key once, and return those below the threshold."""
        mask, threshold, digest = self._mask, self.threshold, xxh3_64_intdigest
        row0, row1, row2 = self._rows
        rejected: list[Key] = []
        for key in keys:
            # One 64-bit hash gives three positions: a start, and a stride that is independent of it.
            bits = digest(key)
            stride = bits >> 32
            at0 = bits & mask
            at1 = (at0 + stride) & mask
            at2 = (at1 + stride) & mask
            count0 = row0[at0]
            count1 = row1[at1]
            count2 = row2[at2]
            least = count0 if count0 < count1 else count1
            if count2 < least:
                least = count2
            if least < threshold:
                rejected.append(key)
            if least < _CEILING:
                more = least + 1
                if count0 < more:
                    row0[at0] = more
                if count1 < more:
                    row1[at1] = more
                if count2 < more:
                    row2[at2] = more
        self._fresh += len(keys)
        if self._fresh >= self.window:
            self._age()
        return dict.fromkeys(rejected, "infrequent") if rejected else NOTHING_REJECTED

    def _age(self) -> None:
        self._fresh = 0
        for row in self._rows:
            row[:] = row.translate(_HALF)


# --- priority -----------------------------------------------------------------------------------------------------


class PriorityPrefixFilter:
    """A policy that keeps the leading blocks with a high priority.

    A block passes if its priority is at least ``at_least``. The first block below that, and all blocks after it, are
    rejected with the reason ``priority``, since only a prefix without gaps is of use.
    """

    __slots__ = ("_at_least", "_priority_of")

    def __init__(self, priority_of: Callable[[Key], float], at_least: float) -> None:
        self._priority_of = priority_of
        self._at_least = at_least

    def __repr__(self) -> str:
        return f"PriorityPrefixFilter({self._priority_of!r}, {self._at_least!r})"

    def __call__(self, keys: Sequence[Key]) -> Reasons:
        """Return all keys from the first whose priority is too low.

        A priority that is not a number is too low.
        """
        priority_of, at_least = self._priority_of, self._at_least
        for position, key in enumerate(keys):
            if not priority_of(key) >= at_least:
                return dict.fromkeys(keys[position:], "priority")
        return NOTHING_REJECTED


# --- combined policies --------------------------------------------------------------------------------------------


@overload
def AllOf(*policies: Policy) -> Policy: ...
@overload
def AllOf(*policies: AnyPolicy) -> AnyPolicy: ...
def AllOf(*policies: AnyPolicy) -> AnyPolicy:
    """Return a policy that lets a block leave if every member does.

    Members are called in order, for the blocks that remain. A rejected block has the reason of the member that rejected
    it. Once all are rejected, no further member is called.

    The leases of members become one. If a later member raises or is cancelled, those taken so far are released before
    the exception goes on.

    The pipeline needs no task and no deadline if every block is decided before a member has to wait. Each member is
    asked once.

    Returns:
        An :class:`offload.abc.AsyncPolicy` if a member is one, else a plain policy.

    Raises:
        TypeError: a member is not a policy (see :func:`as_policy`).
        ValueError: there is no member.
    """
    return _joined("AllOf", _Survivors, policies)


@overload
def AnyOf(*policies: Policy) -> Policy: ...
@overload
def AnyOf(*policies: AnyPolicy) -> AnyPolicy: ...
def AnyOf(*policies: AnyPolicy) -> AnyPolicy:
    """Return a policy that lets a block leave if one member does.

    Members are called in order, for the blocks rejected so far. A block that all members reject has the reason of the
    first one. Once all may leave, no further member is called. Leases, result and errors are those of :func:`AllOf`.
    """
    return _joined("AnyOf", _Rejects, policies)


def in_thread(policy: Policy) -> AsyncPolicy:
    """Call this policy in a thread, because it blocks.

    It may block on a file, a database or a lock, for example. The loop goes on meanwhile, and ``policy_timeout``
    applies as to any async policy. There is one call at a time. A call that times out is abandoned: the policy is not
    called again before it has returned, and a lock that it takes until then is released.

    Args:
        policy: a plain policy that may be called in any thread. Not one that uses a tier, which only the trio thread
            may.

    Raises:
        TypeError: it is no plain policy.
    """
    plain = as_policy(policy)
    if isinstance(plain, AsyncPolicy):
        raise TypeError(f"{policy!r} is already async: in_thread takes a plain policy")
    return ThreadedPolicy(plain)


@attrs.frozen(eq=False)
class Evaluation:
    """The rest of an evaluation that has to wait.

    One of the two functions must be called, once.
    """

    finish: Callable[[], Awaitable[Reasons | Leased]]
    """The function that goes on, and returns the answer.

    If it raises or is cancelled, it has released all locks.
    """
    abandon: Callable[[], None]
    """The function that releases the locks if no answer is needed."""


def begin(policy: AsyncPolicy, keys: Sequence[Key]) -> Reasons | Leased | Evaluation:
    """Ask a policy as far as it can answer without waiting.

    A member of a combination that has answered is not asked again.
    """
    if isinstance(policy, _AsyncJoined):
        return policy.begin(keys)
    answer = policy.evaluate_nowait(keys)
    return Evaluation(partial(policy.evaluate, keys), _take_no_lock) if answer is None else answer


def _take_no_lock() -> None:
    """Release nothing: a policy that has not waited holds no lock."""


def timed(policy: AnyPolicy, limit: float, blocked: Callable[[Policy, float], None]) -> AnyPolicy:
    """Wrap a policy to report plain policies that block the loop.

    When a plain policy in it blocks for over ``limit`` seconds, ``blocked`` is called with the policy and the time.
    """
    if isinstance(policy, _Joined | _AsyncJoined):
        return policy.of_members(lambda member: timed(member, limit, blocked))
    return policy if isinstance(policy, AsyncPolicy) else _Timed(policy, limit, blocked)


class _Timed:
    """A wrapper that measures how long a plain policy takes.

    Measured is real time, since virtual time does not pass while code runs.
    """

    __slots__ = ("_blocked", "_limit", "_policy")

    def __init__(self, policy: Policy, limit: float, blocked: Callable[[Policy, float], None]) -> None:
        self._policy = policy
        self._limit = limit
        self._blocked = blocked

    def __repr__(self) -> str:
        return repr(self._policy)

    def __call__(self, keys: Sequence[Key]) -> Reasons | Leased:
        began = perf_counter()
        try:
            return self._policy(keys)
        finally:
            seconds = perf_counter() - began
            if seconds > self._limit:
                self._blocked(self._policy, seconds)


def as_policy(policy: object) -> AnyPolicy:
    """Return the argument if it can be a policy.

    Raises:
        TypeError: it is neither a plain callable nor an AsyncPolicy, but an async function, for example, or a class.
    """
    if isinstance(policy, AsyncPolicy):
        return policy
    if isinstance(policy, type):
        raise TypeError(f"a policy is an object, not a class: use {policy.__name__}(...)")
    if not callable(policy):
        raise TypeError(f"a policy is a callable or an AsyncPolicy, not {policy!r}")
    if inspect.iscoroutinefunction(policy) or inspect.iscoroutinefunction(type(policy).__call__):
        raise TypeError(f"a policy that waits must derive from offload.abc.AsyncPolicy: {policy!r}")
    return cast(Policy, policy)


def read_answer(answer: object) -> tuple[Reasons, Callable[[], None] | None]:
    """Split a policy's answer into rejected keys and release function.

    Raises:
        TypeError: it is not an answer of a policy. A lock that came with it has been released.
    """
    release: Callable[[], None] | None = None
    if isinstance(answer, Leased):
        release = answer.release
        answer = answer.reasons
    if isinstance(answer, Mapping):
        return answer, release
    if release is not None:
        release()
    if inspect.iscoroutine(answer):
        answer.close()
        raise TypeError("a policy returned a coroutine: one that waits must derive from offload.abc.AsyncPolicy")
    raise TypeError(f"a policy returns a mapping from rejected keys to reasons, not {answer!r}")


class _Fold(ABC):
    """The pure part of AllOf and AnyOf.

    It takes the members' answers one by one, and has the keys for the next member.
    """

    __slots__ = ("_leases", "_reasons", "rest")

    def __init__(self, keys: Sequence[Key]) -> None:
        self.rest = keys
        self._reasons: Reasons = NOTHING_REJECTED
        self._leases: list[Callable[[], None]] = []

    def take(self, answer: object) -> None:
        """Add the next member's answer about ``rest``."""
        if answer is NOTHING_REJECTED:
            self._narrow(NOTHING_REJECTED)
            return
        reasons, release = read_answer(answer)
        if release is not None:
            self._leases.append(release)
        self._narrow(reasons)

    @abstractmethod
    def _narrow(self, reasons: Reasons) -> None:
        """Update ``rest`` and the result, given the rejected ones of ``rest``."""

    def give_back(self) -> None:
        """Release all locks, the latest first, each once.

        An error in one does not keep the others locked.
        """
        with ExitStack() as stack:
            while self._leases:
                stack.callback(self._leases.pop(0))

    def answer(self) -> Reasons | Leased:
        """Return the combined answer."""
        return Leased(self._reasons, self.give_back) if self._leases else self._reasons


class _Survivors(_Fold):
    """AllOf: the next member decides the blocks that were not rejected."""

    __slots__ = ()

    def _narrow(self, reasons: Reasons) -> None:
        if reasons:
            self.rest = [key for key in self.rest if key not in reasons]
            self._reasons = {**self._reasons, **reasons} if self._reasons else reasons


class _Rejects(_Fold):
    """AnyOf: the next member decides the blocks that were rejected."""

    __slots__ = ("_asked",)

    def __init__(self, keys: Sequence[Key]) -> None:
        super().__init__(keys)
        self._asked = False

    def _narrow(self, reasons: Reasons) -> None:
        first = reasons if not self._asked else self._reasons
        self._asked = True
        self.rest = [key for key in self.rest if key in reasons] if reasons else ()
        self._reasons = {key: first[key] for key in self.rest} if self.rest else NOTHING_REJECTED


class _Joined:
    """A combination of plain policies."""

    __slots__ = ("_fold", "_name", "_policies")

    def __init__(self, name: str, fold: type[_Fold], policies: Sequence[Policy]) -> None:
        self._name = name
        self._fold = fold
        self._policies = policies

    def of_members(self, change: Callable[[AnyPolicy], AnyPolicy]) -> AnyPolicy:
        """Return the same combination with changed members."""
        return _joined(self._name, self._fold, [change(policy) for policy in self._policies])

    def __repr__(self) -> str:
        return f"{self._name}({', '.join(map(repr, self._policies))})"

    def __call__(self, keys: Sequence[Key]) -> Reasons | Leased:
        fold = self._fold(keys)
        try:
            for policy in self._policies:
                fold.take(policy(fold.rest))
                if not fold.rest:
                    break
        except BaseException:
            fold.give_back()
            raise
        return fold.answer()


class _AsyncJoined(AsyncPolicy):
    """A combination of plain and async policies."""

    def __init__(self, name: str, fold: type[_Fold], policies: Sequence[AnyPolicy]) -> None:
        self._name = name
        self._fold = fold
        self._policies = policies

    __repr__ = _Joined.__repr__

    def of_members(self, change: Callable[[AnyPolicy], AnyPolicy]) -> AnyPolicy:
        """Return the same combination with changed members."""
        return _joined(self._name, self._fold, [change(policy) for policy in self._policies])

    async def evaluate(self, keys: Sequence[Key]) -> Reasons | Leased:
        await trio.lowlevel.checkpoint()
        begun = self.begin(keys)
        return await begun.finish() if isinstance(begun, Evaluation) else begun

    def begin(self, keys: Sequence[Key]) -> Reasons | Leased | Evaluation:
        """Ask the members up to the first that has to wait."""
        fold, members = self._fold(keys), iter(self._policies)
        try:
            for policy in members:
                answer = begin(policy, fold.rest) if isinstance(policy, AsyncPolicy) else policy(fold.rest)
                if isinstance(answer, Evaluation):
                    return Evaluation(partial(self._finish, fold, answer, members), partial(_abandon, fold, answer))
                fold.take(answer)
                if not fold.rest:
                    break
        except BaseException:
            fold.give_back()
            raise
        return fold.answer()

    async def _finish(self, fold: _Fold, begun: Evaluation, members: Iterator[AnyPolicy]) -> Reasons | Leased:
        """Wait for this member's answer, and ask the members after it."""
        try:
            fold.take(await begun.finish())
            while fold.rest and (policy := next(members, None)) is not None:
                fold.take(await policy.evaluate(fold.rest) if isinstance(policy, AsyncPolicy) else policy(fold.rest))
        except BaseException:
            fold.give_back()
            raise
        return fold.answer()


def _abandon(fold: _Fold, begun: Evaluation) -> None:
    """Release the locks of an abandoned evaluation, the latest first."""
    with ExitStack() as stack:
        stack.callback(fold.give_back)
        stack.callback(begun.abandon)


def _joined(name: str, fold: type[_Fold], policies: Sequence[AnyPolicy]) -> AnyPolicy:
    if not policies:
        raise ValueError(f"{name} needs at least one policy")
    members = [as_policy(policy) for policy in policies]
    plain = [policy for policy in members if not isinstance(policy, AsyncPolicy)]
    if len(plain) == len(members):
        return _Joined(name, fold, plain)
    return _AsyncJoined(name, fold, members)
