"""A small engine over transformers: chunked prefill, KV prefix reuse, batches, greedy decoding, and mmcache inside.

One `step` is one forward pass over a window of each of some requests. It shows the whole way of a request: look up what
each window needs, encode what is missing, merge, run the model, commit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcache.cache import CacheConfig, Lookup, MultimodalCache
from mmcache.engines.chat import Media, Message, media_of
from mmcache.engines.transformers.accounting import TurnAccount
from mmcache.engines.transformers.adapter import Adapter
from mmcache.engines.transformers.intake import Intake
from mmcache.engines.transformers.kv import KVBlocks, Layers
from mmcache.engines.transformers.plain import Generation, greedy_token
from mmcache.errors import ConfigError
from mmcache.features import FeatureCache
from mmcache.hashing import ContentHasher
from mmcache.items import MultimodalRequest
from mmcache.merge import MergePlan
from mmcache.namespaces import Namespace
from mmcache.planning import ItemStatus
from mmcache.prefix import PrefixMatch
from mmcache.transfer import encoder_inputs

__all__ = ["Engine", "Running", "default_engine"]


@dataclass(slots=True)
class Running:
    """One request on its way through the engine.

    Attributes:
        request: its tokens and items; generated tokens are appended.
        generation: what was generated so far.
        account: what the cache spared it.
        max_new_tokens: when it is done.
        computed: tokens whose keys and values exist.
        media: what its items were made of.
        bare: indices of the items of which only metadata is at hand: their features were evicted, and it may be that
            nobody needs them any more.
    """

    request: MultimodalRequest
    generation: Generation
    account: TurnAccount
    max_new_tokens: int
    started: float
    media: list[Media] = field(default_factory=list)
    bare: set[int] = field(default_factory=set)
    computed: int = 0
    match: PrefixMatch | None = None
    layers: Layers = field(default_factory=list)
    positions: Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether all tokens are generated."""
        return len(self.generation.tokens) >= self.max_new_tokens


class Engine:
    """Runs chats on one model through one `MultimodalCache`, in one thread.

    Args:
        adapter: of the model.
        cache: embeddings; its namespace must say which model and processor settings made them.
        features: processed fields by content.
        hasher: makes the identifiers; the cache's namespace must declare its scheme.
        block_size: tokens a KV block; prefixes are reused in whole blocks.
        kv_blocks: KV blocks that are kept.
    """

    def __init__(
        self,
        adapter: Adapter,
        cache: MultimodalCache,
        features: FeatureCache,
        *,
        hasher: ContentHasher | None = None,
        block_size: int = 16,
        kv_blocks: int = 8192,
    ) -> None:
        self.adapter = adapter
        self.cache = cache
        self.intake = Intake(adapter, features, hasher if hasher is not None else ContentHasher())
        self.kv = KVBlocks(block_size=block_size, capacity_blocks=kv_blocks)

    def submit(
        self,
        messages: Sequence[Message],
        *,
        request_id: str,
        max_new_tokens: int = 4,
        cache_salt: str | None = None,
    ) -> Running:
        """Turn a chat into a request: media that were processed before are neither decoded nor processed again.

        Where the processed features are gone, the item is laid out from its metadata; `start` has it processed again if
        its rows turn out to be needed and not stored.

        Raises:
            MediaError: a medium cannot be decoded, or the model does not take its kind.
            ConfigError: `max_new_tokens` is below 1.
        """
        if max_new_tokens < 1:
            raise ConfigError("a request generates at least one token", request_id=request_id, found=max_new_tokens)
        started = time.perf_counter()
        generation = Generation()
        request, bare = self.intake.request(
            messages, request_id=request_id, cache_salt=cache_salt, generation=generation
        )
        generation.prompt_tokens = request.num_tokens
        account = TurnAccount(len(request.items))
        return Running(request, generation, account, max_new_tokens, started, media_of(messages), bare)

    def start(self, running: Running) -> None:
        """Find the prefix of a request whose keys and values exist, once, before its first step."""
        running.match = self.kv.index.match(running.request)
        running.layers = self.kv.load(running.match)
        running.computed = running.match.num_tokens
        running.account.prefix_tokens = running.computed
        if running.bare:
            self._complete(running)

    def _complete(self, running: Running) -> None:
        """Process again what is neither covered nor stored; the probe's pins keep the rest stored for this request."""
        with self.cache.lookup(running.request, num_computed_tokens=running.computed) as probe:
            gone = [i for i in running.bare if probe.status(i) not in (ItemStatus.COVERED, ItemStatus.STORED)]
        if gone:
            running.request = self.intake.completed(running.request, gone, running.media, running.generation)
            running.bare.difference_update(gone)

    @torch.no_grad()
    def step(self, batch: Sequence[Running], *, chunk: int | None = None) -> None:
        """Run one forward pass: a window of at most `chunk` tokens of every request of the batch.

        Raises:
            Exception: whatever the encoder or the model raised; nothing stays reserved, and the requests can be
                stepped again.
        """
        for running in batch:
            if running.match is None:
                self.start(running)
        lookups: list[Lookup] = []
        try:
            for running in batch:
                lookup = self.cache.lookup(
                    running.request, num_computed_tokens=running.computed, num_scheduled_tokens=chunk
                )
                lookups.append(lookup)
                running.account.settle(running.request, lookup)
            self._encode(batch, lookups)
            for running, lookup, hidden in zip(batch, lookups, self._forward(batch, lookups)):
                running.computed = lookup.window[1]
                self.cache.commit(running.request, running.computed)
                if running.computed == running.request.num_tokens:
                    self._sample(running, hidden)
                if running.match is not None:
                    running.match = self.kv.save(running.request, running.computed, running.layers, running.match)
        finally:
            for lookup in lookups:
                lookup.release()

    def _encode(self, batch: Sequence[Running], lookups: Sequence[Lookup]) -> None:
        owner = {id(lookup): running for running, lookup in zip(batch, lookups)}
        for group in encoder_inputs(lookups, self.adapter.device):
            counts = [owner[id(lookup)].request.items[index].placeholder.num_embeds for lookup, index in group.items]
            rows = self.adapter.encode(group.modality, group.kwargs, counts)
            for (lookup, index), item_rows in zip(group.items, rows):
                self.cache.insert(lookup, {index: item_rows})
                owner[id(lookup)].generation.encoder_runs += 1

    def _forward(self, batch: Sequence[Running], lookups: Sequence[Lookup]) -> list[Tensor]:
        """The model over all windows at once; keys and values go back to the requests.

        Shorter pasts are padded on the left and shorter windows on the right, under a mask; one request needs neither.
        """
        device = self.adapter.device
        windows = [lookup.window for lookup in lookups]
        pasts = [start for start, _ in windows]
        widths = [end - start for start, end in windows]
        past, width = max(pasts), max(widths)
        tokens = [running.request.token_ids[start:end] for running, (start, end) in zip(batch, windows)]
        embeds = self.adapter.embed(torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(device))
        levels = [torch.zeros_like(embeds) for _ in range(self.adapter.levels - 1)]
        MergePlan(lookups).merge_into(embeds, *levels)
        positions = torch.stack(
            [
                self._positions(running, lookup, start, start + width)
                for running, lookup, (start, _) in zip(batch, lookups, windows)
            ],
            dim=1,
        )
        mask = None
        if len(batch) > 1:
            mask = torch.zeros(len(batch), past + width, dtype=torch.long, device=device)
            for row in range(len(batch)):
                mask[row, past - pasts[row] : past + widths[row]] = 1
        cache = self._past(batch, past)
        padded = [_in_rows(flat, widths) for flat in (embeds, *levels)]
        hidden = self.adapter.decode(padded[0], positions.to(device), cache, mask, padded[1:])
        for row, running in enumerate(batch):
            kept = slice(past - pasts[row], past + widths[row])
            running.layers = [(layer.keys[row, :, kept], layer.values[row, :, kept]) for layer in cache.layers]
        return [hidden[row, widths[row] - 1] for row in range(len(batch))]

    def _past(self, batch: Sequence[Running], past: int) -> Any:
        from transformers import DynamicCache

        config = self.adapter.model.config
        if past == 0:
            return DynamicCache(config=config)
        deepest = max(batch, key=lambda running: running.computed)
        data = []
        for layer, (keys, _) in enumerate(deepest.layers):
            padded = [keys.new_zeros(len(batch), keys.shape[0], past, keys.shape[2]) for _ in range(2)]
            for row, running in enumerate(batch):
                if running.computed:
                    for target, source in zip(padded, running.layers[layer]):
                        target[row, :, past - running.computed :] = source
            data.append(tuple(padded))
        return DynamicCache(data, config=config)

    def _positions(self, running: Running, lookup: Lookup, start: int, end: int) -> Tensor:
        """Positions `[axes, end - start]`; beyond the prompt they go on by one from the largest."""
        if running.positions is None:
            tokens = torch.from_numpy(running.request.token_ids.astype("int64"))
            running.positions = self.adapter.positions(tokens, running.request.items, lookup.metadata)
        known = running.positions
        if end > known.shape[1]:
            more = torch.arange(end - known.shape[1]) + int(known[:, : running.request.num_tokens].max()) + 1
            known = torch.cat([known, more.expand(known.shape[0], -1)], dim=1)
        return known[:, start:end]

    def _sample(self, running: Running, hidden: Tensor) -> None:
        logits = self.adapter.logits(hidden)
        token = greedy_token(self.adapter, logits)
        if not running.generation.tokens:
            running.generation.ttft = time.perf_counter() - running.started
        running.generation.add(logits, token)
        if not running.done:
            running.request.extend([token])

    def finish(self, running: Running) -> None:
        """The request is done, failed or aborted; idempotent."""
        if running.match is not None:
            running.match.release()
        self.cache.finish(running.request)

    def run(self, batch: Sequence[Running], *, chunk: int | None = None) -> None:
        """Step requests together until all are done, and finish them, also when a step raises."""
        try:
            while waiting := [running for running in batch if not running.done]:
                self.step(waiting, chunk=chunk)
        finally:
            for running in batch:
                self.finish(running)


def _in_rows(flat: Tensor, widths: Sequence[int]) -> Tensor:
    """Windows that lie behind each other, `[sum(widths), H]`, one in each row and padded on the right: `[B, W, H]`."""
    if len(widths) == 1:
        return flat[None]
    rows = flat.new_zeros(len(widths), max(widths), flat.shape[-1])
    for row, part in enumerate(torch.split(flat, list(widths))):
        rows[row, : len(part)] = part
    return rows


def default_engine(
    adapter: Adapter, *, capacity_bytes: int = 256 << 20, feature_bytes: int = 2 << 30, name: str = "tiny"
) -> Engine:
    """An engine with a cache of its own, under a namespace that says what made the embeddings.

    Args:
        adapter: of the model.
        capacity_bytes: budget of the embeddings.
        feature_bytes: budget of the processed fields on the host.
        name: the model's name, as the deployment calls it.
    """
    namespace = Namespace(
        model=f"{name}-{adapter.model_type}",
        revision=adapter.revision,
        encoder_dtype=str(adapter.model.dtype),
        processor=adapter.settings,
        digest_scheme="xxh3_128",
    )
    config = CacheConfig(
        capacity_bytes=capacity_bytes,
        namespace=namespace,
        row_bytes=dict.fromkeys(adapter.modalities, adapter.row_bytes),
        device=adapter.device,
    )
    return Engine(adapter, MultimodalCache(config), FeatureCache(feature_bytes))
