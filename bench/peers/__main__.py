"""One workload through mmcache's own deciding classes and those of vLLM, SGLang and Dynamo: `python bench/peers`.

Where a package is missing the table says so. Requests come one after the other, without a queue. Of each system the
classes run that decide about content, as its own scheduler calls them; the model, the encoder and the processes between
them do not. Sizes stand in for tensors. All get the same budget for embeddings, the same KV blocks and, but for the
prefix caches, the same prefixes.

Columns: the share of hits (of items that no prefix covers; of a prompt's tokens for prefix caches; of all items for
processor caches), gigabytes of payload that move because of these decisions, and the median microseconds of a request.

    python bench/peers [--requests N] [--workload NAME] [--traces DIR] [--capacity 1GB]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path

from asks import Peer, Unavailable, asks

from mmcache.replay.costs import parse_size
from mmcache.replay.generate import WORKLOADS, generate
from mmcache.replay.traces import read_trace
from mmcache.replay.workload import Turn


def peers(capacity: int, features: int, row_bytes: int, blocks: int) -> tuple[list[Peer], list[str]]:
    """Everybody who can be asked here, and why others cannot."""
    import peer_embeddings
    import peer_mmcache

    found: list[Peer] = [
        peer_mmcache.Ledger(capacity, row_bytes, split=False),
        peer_mmcache.Ledger(capacity, row_bytes, split=True),
        peer_mmcache.Prefix(blocks),
    ]
    missing: list[str] = []

    def vllm() -> list[Peer]:
        import peer_vllm

        return [
            peer_vllm.EncoderCache(capacity, row_bytes),
            peer_vllm.ProcessorCache(features),
            peer_vllm.Prefix(blocks),
        ]

    makers: tuple[Callable[[], list[Peer]], ...] = (
        vllm,
        lambda: [peer_embeddings.sglang(capacity, row_bytes)],
        lambda: [peer_embeddings.dynamo(capacity, row_bytes)],
    )
    for make in makers:
        try:
            found += make()
        except Unavailable as reason:
            missing.append(str(reason))
    return found, missing


def compare(name: str, turns: Iterable[Turn], arguments: argparse.Namespace) -> None:
    found, missing = peers(
        parse_size(arguments.capacity), parse_size(arguments.features), arguments.row_bytes, arguments.blocks
    )
    count = 0
    for ask in asks(turns, arguments.blocks):
        count += 1
        for peer in found:
            peer.serve(ask)
    print(f"\n{name}: {count:,} requests")
    print(f"  {'':<42} {'hits':>7} {'GB moved':>10} {'us':>9}")
    for peer in found:
        for tally in peer.tallies():
            print("  " + tally.row())
    for reason in missing:
        print(f"  not compared: {reason}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="cache classes of serving engines side by side")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="of each workload (%(default)s)")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="default: growing, rolling, catalogue")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="run every *.jsonl and *.jsonl.gz in it, too")
    parser.add_argument("--image-share", type=float, default=0.2, help="of a Mooncake trace's blocks (%(default)s)")
    parser.add_argument("--capacity", default="1GB", help="for embeddings (%(default)s)")
    parser.add_argument("--features", default="4GB", help="for processed features (%(default)s)")
    parser.add_argument("--row-bytes", type=int, default=8192, help="of an embedding (%(default)s)")
    parser.add_argument("--blocks", type=int, default=65536, help="KV blocks of 16 tokens (%(default)s)")
    arguments = parser.parse_args()
    for name in arguments.workload or ["growing", "rolling", "catalogue"]:
        compare(name, generate(name, arguments.requests), arguments)
    if arguments.traces is not None:
        for path in sorted([*arguments.traces.glob("*.jsonl"), *arguments.traces.glob("*.jsonl.gz")]):
            read = partial(read_trace, path, image_share=arguments.image_share)
            compare(path.name, islice(read(), arguments.requests), arguments)


if __name__ == "__main__":
    main()
