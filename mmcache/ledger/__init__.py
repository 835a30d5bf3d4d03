"""The one authority on which encoder outputs are held, reserved, pinned and evicted. Never a tensor."""

from mmcache.ledger.ledger import EncoderLedger
from mmcache.ledger.records import Entry, Ticket

__all__ = ["EncoderLedger", "Entry", "Ticket"]
