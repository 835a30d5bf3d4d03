"""From a scheduler to its workers: only what is missing crosses the process boundary.

A `Sender` (scheduler) turns plans into one small message a worker; payload is written once into an `Arena` of shared
memory, where every worker reads it without a copy. A `Receiver` (worker) hands out steps in order, asks for what it
lacks, and acknowledges. What a receiver has is what it acknowledged in its epoch: nothing is inferred.
"""

try:
    import msgspec  # noqa: F401
except ImportError as error:
    from mmcache.errors import ConfigError

    raise ConfigError("messages between processes need msgspec: pip install mmcache[ipc]") from error

from mmcache.ipc.arena import Arena
from mmcache.ipc.channel import Channel
from mmcache.ipc.peers import LostRows, WorkerReport
from mmcache.ipc.reader import ArenaReader
from mmcache.ipc.receiver import Receiver
from mmcache.ipc.regions import ArenaStats, Region
from mmcache.ipc.segment import remove_abandoned
from mmcache.ipc.sender import Sender, SenderStats
from mmcache.ipc.step import RowStore, WorkerPart, WorkerStep

__all__ = [
    "Arena",
    "ArenaReader",
    "ArenaStats",
    "Channel",
    "LostRows",
    "Receiver",
    "Region",
    "RowStore",
    "Sender",
    "SenderStats",
    "WorkerPart",
    "WorkerReport",
    "WorkerStep",
    "remove_abandoned",
]
