"""`EncoderLedger`: look-up, reservation and pin in one step, under one lock that is held for microseconds."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from mmcache.errors import ConfigError
from mmcache.items import MultimodalRequest
from mmcache.ledger.books import check_books
from mmcache.ledger.budget import Budget
from mmcache.ledger.checks import check_length, check_report, check_settings, check_shrink, check_sizes
from mmcache.ledger.loads import TierLoads
from mmcache.ledger.records import Entry, PinnedMatch, Session, Ticket
from mmcache.ledger.sessions import Sessions, id_of
from mmcache.ledger.table import EntryTable
from mmcache.ledger.tally import Tally, stats_of
from mmcache.ledger.waiting import WaitingLine, Waits, news_of, wake
from mmcache.ledger.workers import Step, Workers
from mmcache.planning import Progress, StepPlan, check_window, needed_items
from mmcache.policies import EvictionPolicy, as_policy
from mmcache.stats import CacheStats

__all__ = ["EncoderLedger"]


class EncoderLedger:
    """Bytes, pins and reservations of encoder outputs: the one authority, without a tensor.

    Thread-safe. Every method takes the lock once, for microseconds, and calls nobody while it holds it. Engines whose
    workers are other processes send them each `plan`, and report back with `settle` and `reconcile`; engines of one
    process use `MultimodalCache`, which does that with an `EmbeddingStore` at hand.

    Attributes:
        ledger_id: unique to this ledger and start; workers that see another one begin anew.
        budget: bytes used and fixed, evictions and uncached items. Read only.
        counts: encodes, joins, takeovers, stale and lost entries. Read only.
        loads: what tiers say of rows that they load.
        waits: threads and tasks that wait for a lookup's news.
    """

    def __init__(
        self,
        capacity_bytes: int,
        policy: str | EvictionPolicy,
        *,
        row_bytes: Mapping[str, int] | None = None,
        lease_seconds: float = 120.0,
        split_by_adapter: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty ledger.

        Args:
            capacity_bytes: the budget for embeddings.
            policy: eviction order, as in `CacheConfig`; owned by the ledger from now on.
            row_bytes: bytes of one embedding row by modality, where known before the first encode.
            lease_seconds: after this time a waiter may take over from an owner that has not delivered.
            split_by_adapter: whether adapters touch the encoder, so that embeddings belong to one adapter each.
            clock: monotonic seconds.

        Raises:
            ConfigError: a capacity, bytes of a row, a lease or a policy that cannot be.
        """
        self.ledger_id = uuid.uuid4().hex
        capacity, sizes, lease = check_settings(capacity_bytes, row_bytes or {}, lease_seconds)
        self.budget = Budget(capacity, as_policy(policy))
        self._table = EntryTable(self.budget, sizes, lease, split_by_adapter, clock)
        self.counts = self._table.counts
        self._sessions = Sessions(self.budget)
        self._workers = Workers(self.ledger_id)
        self._line = WaitingLine(self.budget)
        self._tally = Tally()
        self._woken = self._table.woken
        self._lock = threading.Lock()
        self._next_plan = 0
        self.loads = TierLoads(self._table, self._lock, self._wake)
        self.waits = Waits(self._table, self._lock, self._wake)

    @property
    def epoch(self) -> int:
        """Advances with `invalidate`: an encode that began in an earlier epoch does not become an entry."""
        return self._table.epoch

    @property
    def row_bytes(self) -> Mapping[str, int]:
        """Bytes of one embedding row by modality, as configured or learned. Read only."""
        return self._table.row_bytes

    def content_of(self, request: MultimodalRequest, identifier: str) -> tuple[str | None, str | None, str]:
        """Equal for two items, of whatever requests, that share an embedding."""
        return self._table.content_of(request, identifier)

    def holds(self, request: MultimodalRequest, index: int) -> bool:
        """Whether rows of the item's content are stored or on their way, as things stand. Nothing is pinned."""
        return self._table.holds(request, index)

    def open(
        self,
        request: MultimodalRequest,
        start: int,
        end: int,
        needed_from: int,
        lookahead: int,
        match: PinnedMatch | None = None,
    ) -> Ticket:
        """Decide about the window `[start, end)` of a request; bounds are taken as valid (see `check_window`).

        Raises:
            ConfigError: the eviction policy failed (`Budget.complain`); it is as if nobody had asked.
        """
        num_items = len(request.items)
        first, later, needed = needed_items(request, needed_from, end + lookahead, num_items)
        request_id = request.request_id
        # By hand where every step passes: half the price of `with`.
        self._lock.acquire()
        try:
            session = self._sessions.get(request_id)
            if session is None:
                session = self._sessions[request_id] = Session(request_id)
            if self._line.positions:
                self._line.withdraw(request_id)
            self._next_plan = number = self._next_plan + 1
            ticket = Ticket(
                number, request, session, start, end, needed_from, lookahead, first, later, num_items, match
            )
            session.tickets[ticket] = None
            if needed:
                self._table.resolve(ticket, needed)
        except ConfigError:
            self._next_plan -= 1
            self._table.give_up(ticket)
            self._sessions.take_back(ticket)
            raise
        finally:
            self._lock.release()
            if self._woken:
                self._wake()
        return ticket

    def plan(
        self,
        request: MultimodalRequest,
        *,
        num_computed_tokens: int,
        num_scheduled_tokens: int | None = None,
        needed_from: int | None = None,
        lookahead: int = 0,
    ) -> StepPlan:
        """Decide about a step of a request, as a message for workers; arguments as in `MultimodalCache.lookup`.

        The plan names the handles to drop, each in one plan only: send every plan to every worker, in order.
        The step stays open until `release`.

        Raises:
            WindowError: a bound lies outside the request's tokens.
        """
        bounds = check_window(request, num_computed_tokens, num_scheduled_tokens, needed_from, lookahead)
        return self._send(self.open(request, *bounds))

    def shrink(self, plan: StepPlan, num_scheduled_tokens: int) -> StepPlan:
        """The scheduler cut the step: the plan for a shorter window, to be sent as any other in the old one's place.

        Raises:
            WindowError: not an integer from 0 to the window's present length.
            ReleasedError: the plan is not open here.
        """
        ticket = self._workers.ticket(plan)
        self.cut(ticket, num_scheduled_tokens)
        return self._send(ticket)

    def refresh(self, plan: StepPlan) -> StepPlan:
        """The plan as things stand now, for instance after `poll` told of items that became its own to encode.

        Raises:
            ReleasedError: it is not open here.
        """
        return self._send(self._workers.ticket(plan))

    def _send(self, ticket: Ticket) -> StepPlan:
        with self._lock:
            return self._workers.send(ticket, self.epoch, self.budget.take_drops())

    def snapshot(self, ticket: Ticket) -> StepPlan:
        """The lookup's plan as it was decided, without handles to drop."""
        with self._lock:
            return self._workers.snapshot(ticket, self.epoch)

    def cut(self, ticket: Ticket, num_scheduled_tokens: int) -> None:
        """`shrink`, of a lookup: what only the cut tokens needed is given up, as if never asked for."""
        with self._lock:
            end, (first, later, needed) = check_shrink(ticket, num_scheduled_tokens)
            ticket.first, ticket.later, ticket.end, ticket.plan, ticket.decided = first, later, end, None, None
            self._sessions.shrink(ticket, self._table.shrink(ticket, needed))
        self._wake()

    def admit(self, ticket: Ticket, sizes: Mapping[int, int]) -> list[Entry]:
        """Make room for rows whose size was unknown at reservation, before they are stored.

        Args:
            ticket: the lookup that encoded.
            sizes: item index to bytes of its rows.

        Returns:
            Entries that were evicted to make room, or before: drop their rows, then store.

        Raises:
            ConfigError: the eviction policy failed; to ask again is to try again.
        """
        with self._lock:
            for index, nbytes in sizes.items():
                entry = ticket.entries.get(index)
                if entry is not None and entry.owner is ticket:
                    self._table.size(entry, nbytes, may_evict=True)
            self.budget.complain()
            return self.budget.take_drops()

    def settle(self, step: Step, sizes: Mapping[int, int], seconds: float | None = None) -> None:
        """The rows of these items are stored under the handles of their entries: whoever waits has them now.

        Args:
            step: the lookup or plan that encoded them; items that are no longer its own to encode are passed over.
            sizes: item index to bytes of its rows.
            seconds: what encoding all of them took, if measured.

        Raises:
            ReleasedError: the plan is not open here.
            EmbeddingError: items that the plan does not need, sizes that rows of their number and modality do not have,
                or a time that is none; nothing has changed then.
        """
        ticket = step if type(step) is Ticket else self._workers.ticket(step)
        sizes = check_sizes(step, sizes, seconds, ticket.request.request_id)
        with self._lock:
            check_report(self._table, ticket, sizes)
            self._table.settle(ticket, sizes, seconds)
        self._wake()

    def release(self, step: Step) -> bool:
        """End a step: give up what is still to be encoded or awaited; the request's pins stay. Idempotent.

        Returns:
            Whether it was open.
        """
        ticket = step if type(step) is Ticket else self._workers.find(step)  # type: ignore[arg-type]
        if ticket is None:
            return False
        self._lock.acquire()
        try:
            if ticket.released:
                return False
            self._close(ticket)
            session = ticket.session
            del session.tickets[ticket]
            if session.request_id in self._line.positions:
                self._sessions.wait(session.request_id)  # rows that came after it was announced are pinned as well
            elif session.passed:
                self._sessions.let_go(session)
        finally:
            self._lock.release()
        if self._woken:
            self._wake()
        return True

    def _close(self, ticket: Ticket) -> None:
        ticket.released = True
        if self._workers.plans:
            self._workers.plans.pop(ticket.plan_id, None)
        self._tally.add(ticket)
        if ticket.unsettled:
            self._table.give_up(ticket)
        # Entries and lookups know each other; parted here, they are freed at once and not by the garbage collector.
        ticket.entries = {}
        if ticket.event is not None or ticket.futures:
            self._woken.append(ticket)

    def commit(self, request: MultimodalRequest, num_tokens: int) -> int:
        """The KV of the first `num_tokens` tokens exists: unpin what has no row beyond them. Returns their number.

        Raises:
            WindowError: more tokens than the request has, or fewer than none.
        """
        num_tokens = check_length(request, num_tokens)
        with self._lock:
            self._sessions.commit(request, num_tokens)
        return num_tokens

    def finish(self, request: MultimodalRequest | str) -> list[Ticket]:
        """The request, or the one of that id, is done, aborted or gone: its lookups end and its pins go. Idempotent.

        Returns:
            The lookups that were still open.
        """
        request_id = id_of(request)
        with self._lock:
            self._line.withdraw(request_id)
            session = self._sessions.pop(request_id, None) or Session(request_id)
            open_tickets = list(session.tickets)
            for ticket in open_tickets:
                self._close(ticket)
            self._sessions.unpin(session, list(session.held))
        self._wake()
        return open_tickets

    def announce(self, request: MultimodalRequest, num_computed_tokens: int = 0) -> Sequence[int]:
        """The request waits in the queue: what it will need is evicted last, and what it holds becomes droppable.

        Announcing it again keeps its place. Its next lookup ends the announcement.

        Args:
            request: the request.
            num_computed_tokens: length of the prefix whose KV exists already, if known.

        Returns:
            Indices of the items that it will need.

        Raises:
            WindowError: `num_computed_tokens` lies outside the request's tokens.
        """
        num_computed_tokens = check_length(request, num_computed_tokens)
        _, _, needed = needed_items(request, num_computed_tokens, request.num_tokens)
        contents = list(dict.fromkeys(self._table.content_of(request, request._identifiers[i]) for i in needed))
        with self._lock:
            self._sessions.wait(request.request_id)
            self._line.announce(request.request_id, contents)
        return needed

    def withdraw(self, request: MultimodalRequest | str) -> None:
        """The request, or the one of that id, no longer waits. Idempotent."""
        with self._lock:
            self._line.withdraw(id_of(request))

    def invalidate(self, identifier: str | None = None) -> None:
        """Forget one content, or everything, and begin a new epoch; holders keep theirs.

        An encode under way is good for its own lookup and is not published; of the lookups that wait for it, one is
        told to encode anew.
        """
        with self._lock:
            self._table.invalidate(identifier)
        self._wake()

    def clear(self) -> None:
        """Forget everything; see `invalidate`."""
        self.invalidate()

    def reconcile(
        self, worker_epoch: str, held: Iterable[int] | None, lost: Iterable[int], worker: Hashable = 0
    ) -> None:
        """Believe a worker's report: what it does not hold is planned as missing again.

        Args:
            worker_epoch: unique to the worker's store and start.
            held: all handles that it holds; None with an epoch that the ledger knows.
            lost: handles that plans called stored and that it does not hold.
            worker: which worker reports.

        Raises:
            RequestError: they are no handles; nothing has changed then.
        """
        with self._lock:
            gone = self._workers.lost(self.budget.entries, worker, worker_epoch, held, lost)
            self._table.lose([(entry, self._sessions.drop(entry)) for entry in gone])
        self._wake()

    def take_drops(self) -> list[Entry]:
        """Entries whose rows workers have to drop; they are told once."""
        with self._lock:
            return self.budget.take_drops()

    def poll(self, step: Step) -> Progress:
        """What has changed for the lookup or plan since the last time; takes over from owners beyond their lease."""
        ticket = self._workers.ticket(step)
        with self._lock:
            progress = news_of(self._table, ticket)
        self._wake()
        return progress

    def check(self) -> None:
        """Add the books up anew; for tests and debugging, linear in the entries.

        Raises:
            MMCacheError: they do not balance.
        """
        with self._lock:
            check_books(self._table, self._sessions.values())

    def stats(self, prefix_found: int = 0, prefix_asked: int = 0) -> CacheStats:
        """Counters, taken in one moment."""
        with self._lock:
            return stats_of(self._table, self._tally, self._next_plan, prefix_found, prefix_asked)

    def _wake(self) -> None:
        """Wake whoever waits on lookups that have news; without the lock."""
        if self._woken:
            wake(self._woken, self._lock)
