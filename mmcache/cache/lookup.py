"""`Lookup`: what one step of one request needs, bound to the cache that holds it."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Hashable
from math import isnan
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from mmcache.errors import (
    FieldError,
    ReleasedError,
    RequestError,
    SelfWaitError,
    UnresolvedItemError,
    UnsupportedError,
    WaitTimeoutError,
)
from mmcache.items import MultimodalRequest
from mmcache.ledger import Ticket
from mmcache.ledger.snapshots import bytes_of
from mmcache.merge import MergePlan
from mmcache.planning import (
    FieldAction,
    ItemStatus,
    PlanBytes,
    Progress,
    StepPlan,
    action_of,
    check_index,
    unneeded_status,
)

if TYPE_CHECKING:
    from mmcache.cache.cache import MultimodalCache

__all__ = ["Lookup"]

# Forgotten lookups are released by whoever next calls the cache: a waiter does so at least this often, in seconds.
_LOOK_AGAIN = 1.0


class Lookup:
    """A `StepPlan` bound to its cache. Statuses are live: an insert, by whomever, turns waiters' items to `STORED`.

    Release it when the step is over; it is a context manager. After its release, or the finish of its request, anything
    but `release` raises `ReleasedError`.
    """

    __slots__ = ("__weakref__", "_cache", "_ticket")

    def __init__(self, cache: MultimodalCache, ticket: Ticket) -> None:
        """Made by `MultimodalCache.lookup`."""
        self._cache = cache
        self._ticket = ticket

    def __enter__(self) -> Lookup:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        try:
            forgotten = not self._ticket.released
        except AttributeError:  # the constructor did not get that far
            return
        if forgotten:
            # A finalizer runs at any moment, in any thread, perhaps inside a lock: leave it to the next call.
            self._cache._orphans.append(self._ticket)

    # -- what was decided ----------------------------------------------------------------------------------------------

    @property
    def request(self) -> MultimodalRequest:
        """The request."""
        return self._ticket.request

    @property
    def num_computed_tokens(self) -> int:
        """Length of the prefix whose KV exists."""
        return self._open().start

    @property
    def window(self) -> tuple[int, int]:
        """The tokens of this step: `(num_computed_tokens, end)`."""
        ticket = self._open()
        return ticket.start, ticket.end

    @property
    def needed(self) -> tuple[int, ...]:
        """Indices of the items with rows in window or look-ahead that are not covered, in order."""
        return tuple(self._open().entries)

    @property
    def missing(self) -> tuple[int, ...]:
        """Indices of the items that this lookup has to encode: of each content the first."""
        return self._open().with_status(ItemStatus.MISSING)

    @property
    def stored(self) -> tuple[int, ...]:
        """Indices of the needed items whose rows are at hand."""
        return self._open().with_status(ItemStatus.STORED)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Indices of the needed items that somebody else is encoding."""
        return self._open().with_status(ItemStatus.IN_FLIGHT)

    def status(self, index: int) -> ItemStatus:
        """The item's status as things stand.

        Raises:
            RequestError: the request has no such item.
        """
        ticket = self._open()
        index = check_index(ticket.request.request_id, index, ticket.num_items)
        entries = ticket.entries  # another thread that ends the lookup puts others in their place
        if index in entries:
            return ticket.status_of(entries[index])
        return unneeded_status(ticket.request, ticket.needed_from, index)

    def action(self, index: int, field: str) -> FieldAction:
        """What becomes of the item's field in this step, as things stand.

        Raises:
            RequestError: the request has no such item.
            FieldError: the item has no such field.
        """
        status = self.status(index)
        request = self._ticket.request
        index = operator.index(index)
        fields = request.items[index].fields
        if fields is None or not isinstance(field, str) or field not in fields:
            raise FieldError("the item has no such field", request_id=request.request_id, item=index, field=field)
        first = status is ItemStatus.MISSING and index in self.missing
        return action_of(status, fields.config(field).keep_on_cpu, first)

    @property
    def bytes(self) -> PlanBytes:
        """Bytes of all fields of the request, by what becomes of them, as things stand."""
        return bytes_of(self._open())

    @property
    def plan(self) -> StepPlan:
        """The decision as it was made: frozen, picklable, free of tensors."""
        return self._cache._ledger.snapshot(self._open())

    def metadata(self, field: str) -> list[Tensor]:
        """A `keep_on_cpu` field of all items that have it, covered ones too, in order, on the CPU; maybe none.

        Raises:
            FieldError: an item has the field, but it is not marked `keep_on_cpu`.
        """
        ticket = self._open()
        return ticket.request._metadata_until(field, ticket.num_items)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def rows(self, index: int) -> Tensor:
        """The embedding rows `[num_embeds, width]` of a needed item. Do not write to them.

        Raises:
            RequestError: the request has no such item.
            UnresolvedItemError: the item is not needed in this step, or its rows are not here yet.
        """
        ticket = self._open()
        request = ticket.request
        index = check_index(request.request_id, index, ticket.num_items)
        given = request.items[index].embeds
        if given is not None:
            return given
        entry = ticket.entries.get(index)
        rows = None if entry is None else self._cache._store.get(entry.handle)
        if rows is None:
            raise UnresolvedItemError(
                "the item has no rows in this lookup",
                request_id=request.request_id,
                item=index,
                found=self.status(index).value,
            )
        return rows

    def key(self, index: int) -> Hashable:
        """Equal for two items, of whatever lookups, whose rows are the same; items of two caches never are."""
        ticket = self._open()
        index = check_index(ticket.request.request_id, index, ticket.num_items)
        item = ticket.request.items[index]
        if item.embeds is not None:
            return ("given", id(item.embeds))
        ledger = self._cache._ledger
        content = ledger.content_of(ticket.request, item.identifier)
        entry = ticket.entries.get(index)
        # What no other lookup finds (older weights, another number of rows) is encoded for this one alone.
        own = entry.handle if entry is not None and entry.detached else None
        return ledger.ledger_id, content, item.modality, item.placeholder.num_embeds, own

    def holds(self, index: int) -> bool:
        """Whether rows of an item, needed in this step or not, are here or on their way, as things stand.

        Raises:
            RequestError: the request has no such item.
        """
        ticket = self._open()
        index = check_index(ticket.request.request_id, index, ticket.num_items)
        given = ticket.request.items[index].embeds is not None
        return given or self._cache._ledger.holds(ticket.request, index)

    def merge_into(self, inputs_embeds: Tensor, *levels: Tensor) -> Tensor:
        """Write the window's embedding rows over their placeholders, in place; see `MergePlan.merge_into`.

        Args:
            inputs_embeds: `[tokens of the window, or more, hidden]`; row 0 is the window's first token.
            levels: DeepStack destinations of the same shape, if the rows hold them.

        Returns:
            `inputs_embeds`.

        Raises:
            UnresolvedItemError: rows are missing; nothing has been written.
        """
        if not self._open().entries and not levels:
            return inputs_embeds
        return MergePlan([self]).merge_into(inputs_embeds, *levels)

    # -- progress ------------------------------------------------------------------------------------------------------

    def poll(self) -> Progress:
        """What has changed since the last poll, without waiting: items that arrived, or became this request's."""
        ticket = self._open()
        self._cache._release_forgotten()
        return self._cache._ledger.poll(ticket)

    def wait(self, timeout: float | None = None) -> Progress:
        """Wait until something changes for the items in flight; at once with nothing if there are none.

        Not for a scheduler's loop, which polls. Bounded even without `timeout`: when an owner exceeds its lease, a
        waiter takes over.

        Args:
            timeout: seconds, or None.

        Raises:
            SelfWaitError: all that is awaited is this very request's to encode.
            WaitTimeoutError: nothing changed in time.
            ReleasedError: the lookup, or its request, ended meanwhile.
            RequestError: the timeout is no number.
        """
        deadline = self._deadline(timeout)
        event = threading.Event()

        def arm(ticket: Ticket) -> None:
            event.clear()
            ticket.event = event

        while True:
            progress, pause = self._look(arm)
            if pause is None:
                return progress
            event.wait(self._pause(pause, deadline))

    async def ready(self, timeout: float | None = None) -> Progress:
        """Like `wait`, for asyncio: other tasks run meanwhile."""
        import asyncio

        deadline = self._deadline(timeout)
        loop = asyncio.get_running_loop()
        while True:
            future: asyncio.Future[None] = loop.create_future()

            def arm(ticket: Ticket, future: asyncio.Future[None] = future) -> None:
                ticket.futures = [*(ticket.futures or ()), (loop, future)]

            progress, pause = self._look(arm)
            if pause is None:
                return progress
            try:
                await asyncio.wait((future,), timeout=self._pause(pause, deadline))
            finally:
                self._cache._ledger.waits.end(self._ticket, future)

    def _look(self, arm: Callable[[Ticket], None]) -> tuple[Progress, float | None]:
        """News and None, or no news and for how long to sleep at most; no news and None where nothing is awaited."""
        ticket = self._open()
        self._cache._release_forgotten()
        progress, pause, own = self._cache._ledger.waits.begin(ticket, arm)
        if not progress:
            self._open()  # another thread may have ended it meanwhile
        if own and not progress:
            raise SelfWaitError(
                "waiting for items that this request has to encode itself", request_id=ticket.request.request_id
            )
        return progress, None if progress else pause

    def _deadline(self, timeout: float | None) -> float | None:
        if timeout is None:
            return None
        if isinstance(timeout, bool) or not isinstance(timeout, Real) or isnan(timeout):
            raise RequestError(
                "a timeout is a number of seconds",
                request_id=self._ticket.request.request_id,
                field="timeout",
                found=repr(timeout),
            )
        return time.monotonic() + float(timeout)

    def _pause(self, pause: float, deadline: float | None) -> float:
        pause = min(pause, _LOOK_AGAIN)
        if deadline is None:
            return pause
        left = deadline - time.monotonic()
        if left <= 0:
            raise WaitTimeoutError("nothing arrived in time", request_id=self._ticket.request.request_id)
        return min(pause, left)

    # -- the end -------------------------------------------------------------------------------------------------------

    def shrink(self, num_scheduled_tokens: int) -> None:
        """The scheduler cut the step: make this the lookup for a shorter window, and give up what that leaves out.

        Raises:
            WindowError: not an integer from 0 to the window's present length.
        """
        self._cache._ledger.cut(self._open(), num_scheduled_tokens)
        self._cache._apply_drops()

    def release(self) -> None:
        """End the step: give up what was still to be encoded or awaited. Idempotent.

        The request keeps its pins on items with rows still to merge until `commit` passes them or `finish`.
        """
        ticket, cache = self._ticket, self._cache
        if not ticket.released and cache._ledger.release(ticket):
            if ticket.match is not None:
                ticket.match.release()
            if cache._budget.drops:
                cache._apply_drops()

    def _open(self) -> Ticket:
        ticket = self._ticket
        if ticket.released:
            raise ReleasedError("the lookup has been released", request_id=ticket.request.request_id)
        if self._cache._orphans:  # what was forgotten may be what this one waits for
            self._cache._release_forgotten()
        return ticket

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError("a lookup is bound to its cache, and has no copies: send its plan")

    def __repr__(self) -> str:
        ticket = self._ticket
        state = "released" if ticket.released else f"{len(ticket.entries)} items needed"
        return f"Lookup({ticket.request.request_id!r}, window=({ticket.start}, {ticket.end}), {state})"
