"""vLLM's own classes: encoder cache manager, processor caches of both processes, and KV cache manager."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from asks import BLOCK, Ask, Tally, Unavailable, timed

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONHASHSEED", "0")  # else it warns that its seed is random

try:
    import torch
    import vllm
    from vllm.multimodal.cache import LruKeyReplicatedReceiverCache, LruKeyReplicatedSenderCache
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFeatureSpec,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        PlaceholderRange,
    )
    from vllm.multimodal.utils import strip_covered_mm_data
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
except ImportError as error:
    raise Unavailable(f"vLLM is not installed, or is another version than 0.32 and 0.33: {error}") from error

VERSION = vllm.__version__


def _item(payload_bytes: int) -> MultiModalKwargsItem:
    """A payload of that size, without memory, and a grid that stays on the CPU."""
    pixels = torch.empty(payload_bytes, dtype=torch.uint8, device="meta")
    grid = torch.ones(3, dtype=torch.int64)
    return MultiModalKwargsItem(
        {
            "pixel_values": MultiModalFieldElem(data=pixels, field=MultiModalBatchedField()),
            "image_grid_thw": MultiModalFieldElem(data=grid, field=MultiModalBatchedField(keep_on_cpu=True)),
        }
    )


def _payload(features: list[Any]) -> int:
    """Bytes of pixels that are still in the features."""
    fields = (f.data.get("pixel_values") for f in features if f.data is not None)
    return sum(elem.data.nbytes for elem in fields if elem is not None)


class _Requests:
    """vLLM's requests for asks; one is made for each peer's ask, untimed."""

    def __init__(self, hasher: Any = None) -> None:
        self._count = 0
        self._items: dict[str, MultiModalKwargsItem] = {}
        self._sampling = SamplingParams(max_tokens=1)
        self._hasher = hasher

    def of(self, ask: Ask) -> Request:
        self._count += 1
        if len(self._items) > 100_000:
            self._items.clear()
        features = []
        for offset, clip in ask.clips:
            item = self._items.get(clip.identifier)
            if item is None:
                item = self._items[clip.identifier] = _item(clip.payload_bytes)
            place = PlaceholderRange(offset=offset, length=clip.rows)
            features.append(MultiModalFeatureSpec(item, clip.modality, clip.identifier, place, clip.identifier))
        return Request(
            str(self._count),
            ask.request.token_ids.tolist(),
            self._sampling,
            None,
            mm_features=features,
            block_hasher=self._hasher,
        )


class EncoderCache:
    """Scheduler side: which items are encoded, and what the workers are sent."""

    def __init__(self, capacity_bytes: int, row_bytes: int) -> None:
        self._manager = EncoderCacheManager(capacity_bytes // row_bytes)
        self._requests = _Requests()
        self._tally = Tally(f"vLLM {VERSION}, encoder cache", "check, allocate, free, strip; ships what is uncovered")

    def serve(self, ask: Ask) -> None:
        manager, tally = self._manager, self._tally
        request = self._requests.of(ask)
        computed = ask.num_computed_tokens
        ends = [offset + clip.rows for offset, clip in ask.clips]
        outcome: dict[str, Any] = {}

        def step() -> None:
            found = encoded = 0
            sent = strip_covered_mm_data(request.mm_features, computed, uses_mrope=True)
            needed = [index for index, end in enumerate(ends) if end > computed]
            for index in needed:
                if manager.check_and_update_cache(request, index):
                    found += 1
                    continue
                encoded += 1
                if manager.can_allocate(request, index, 1 << 40, 0):
                    manager.allocate(request, index)
            for index in list(manager.get_cached_input_ids(request)):
                manager.free_encoder_input(request, index)
            manager.freed.clear()
            outcome.update(found=found, asked=found + encoded, sent=sent)

        timed(tally, step)
        tally.asked += outcome["asked"]
        tally.found += outcome["found"]
        tally.shipped += _payload(outcome["sent"])

    def tallies(self) -> list[Tally]:
        return [self._tally]


class ProcessorCache:
    """Front end and engine: which payload goes from one process to the other."""

    def __init__(self, capacity_bytes: int) -> None:
        config = SimpleNamespace(
            get_multimodal_config=lambda: SimpleNamespace(mm_processor_cache_gb=capacity_bytes / 2**30)
        )
        self._sender = LruKeyReplicatedSenderCache(config)
        self._receiver = LruKeyReplicatedReceiverCache(config)
        self._requests = _Requests()
        remark = "ships what the engine's process lacks"
        self._front = Tally(f"vLLM {VERSION}, processor cache, front end", remark)
        self._engine = Tally(f"vLLM {VERSION}, processor cache, engine", "receives it", ships=False)

    def serve(self, ask: Ask) -> None:
        features = self._requests.of(ask).mm_features
        hashes = [feature.identifier for feature in features]
        sent: list[Any] = []

        def send() -> None:
            cached = self._sender.is_cached(hashes)
            for name in hashes:
                self._sender.touch_sender_cache_item(name)
            given = [None if known else (f.data, []) for known, f in zip(cached, features)]
            sent.extend(item for item, _ in self._sender.get_and_update(given, hashes))

        timed(self._front, send)
        came = [replace(feature, data=item) for feature, item in zip(features, sent)]
        timed(self._engine, lambda: self._receiver.get_and_update_features(came))
        for tally in (self._front, self._engine):
            tally.asked += len(sent)
            tally.found += sum(item is None for item in sent)
        self._front.shipped += sum(item["pixel_values"].data.nbytes for item in sent if item is not None)

    def tallies(self) -> list[Tally]:
        return [self._front, self._engine]


class Prefix:
    """Block hashes of a prompt, and the blocks that are cached under them."""

    def __init__(self, blocks: int) -> None:
        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self._manager = KVCacheManager(config, 1 << 30, scheduler_block_size=BLOCK, hash_block_size=BLOCK)
        self._requests = _Requests()
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._hashes = Tally(f"vLLM {VERSION}, block hashes", "sha256, its default", ships=False)
        self._blocks = Tally(f"vLLM {VERSION}, KV cache manager", "look-up, slots, free; hits are tokens", ships=False)

    def serve(self, ask: Ask) -> None:
        manager, request = self._manager, self._requests.of(ask)
        request.block_hashes = []
        request.block_hashes.extend(timed(self._hashes, lambda: self._hasher(request)))

        def step() -> int:
            blocks, computed, _ = manager.get_computed_blocks(request)
            manager.allocate_slots(request, request.num_tokens - computed, computed, blocks)
            return int(computed)

        self._blocks.found += timed(self._blocks, step)
        self._blocks.asked += request.num_tokens
        # The answer's tokens have KV when the request ends, as those of all others have here.
        answer = ask.output.tolist()
        if answer:
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(answer)
            request.block_hashes.extend(self._hasher(request))
            manager.allocate_slots(request, len(answer))
        manager.free(request)

    def tallies(self) -> list[Tally]:
        return [self._hashes, self._blocks]
