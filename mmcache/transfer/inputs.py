"""`encoder_inputs`: the fields of the items to encode, joined into batches, where the encoder wants them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mmcache.errors import ConfigError, MissingContentError, WindowError
from mmcache.fields import FieldConfig, FieldValue, ItemFields, join_fields
from mmcache.fields.values import value_bytes
from mmcache.integers import as_int
from mmcache.planning import needed_items
from mmcache.staging import Event, Staging, staging_for
from mmcache.transfer.lookups import PrefetchLookup, TransferLookup, listed
from mmcache.transfer.sending import Sender, leaves

__all__ = ["EncoderBatch", "Transfer", "encoder_inputs"]


class _Resident:
    """A field of one item on the device: since when, and in which version, as a model may write to its inputs."""

    __slots__ = ("__weakref__", "_versions", "arrival", "value")

    def __init__(self, value: FieldValue, arrival: Event) -> None:
        self.value = value
        self.arrival = arrival
        self._versions = _versions(value)

    @property
    def intact(self) -> bool:
        return self._versions == _versions(self.value)


@dataclass(frozen=True, slots=True, eq=False)
class EncoderBatch:
    """Items that one call of the encoder takes.

    Attributes:
        modality: of all of them.
        items: (lookup, index of the item in its request), in the order of the batch; each content once.
        kwargs: field name to what `join_fields` makes of the items' fields: payload on the device, `keep_on_cpu` fields
            on the CPU. Tensors may share memory with the items' (on the CPU) or with other batches' (on a device): do
            not write to them.
        moved_bytes: bytes sent from the host to the device for this batch.
    """

    modality: str
    items: list[tuple[Any, int]]
    kwargs: dict[str, FieldValue]
    moved_bytes: int = 0
    _held: list[_Resident] = field(default_factory=list, repr=False)

    @property
    def num_embeds(self) -> tuple[int, ...]:
        """Embedding rows of each item, by which an encoder's output for the batch falls apart."""
        return tuple(lookup.request.items[index].placeholder.num_embeds for lookup, index in self.items)


def encoder_inputs(lookups: Sequence[TransferLookup], device: torch.device | str) -> list[EncoderBatch]:
    """What the encoder needs for these lookups: the payload of their missing items, each content once, joined.

    Items of one modality whose fields join into the layout the model takes share a batch. On the CPU nothing is copied
    where items lie one behind the other. On another device the payload is written once, straight into pinned memory in
    its joined form, and copied asynchronously on a side stream; the current stream waits for it, the host does not.

    Args:
        lookups: of one step, in order.
        device: where the encoder runs.

    Returns:
        Batches in the order of their first items; none if nothing is missing.

    Raises:
        MissingContentError: items to encode came as metadata only; names the request and all such items of it.
        ConfigError: PyTorch knows no such device.
        RequestError: something that is no lookup, as a `StepPlan` by itself, which has no payload.
    """
    lookups = listed(lookups)
    if not any(lookup.missing for lookup in lookups):
        return []
    return _transfer_to(_device_of(device)).encoder_inputs(lookups)


class Transfer:
    """The way of encoder inputs to one device, with its pinned memory and what is there already.

    Attributes:
        device: the device.
        moved_bytes: bytes sent from the host so far.
        pageable_bytes: those of them that found no room in pinned memory, and went more slowly.
    """

    def __init__(self, device: torch.device | str, *, prefetch_bytes: int = 0, staging: Staging | None = None) -> None:
        """Make a way to a device.

        Args:
            device: the device.
            prefetch_bytes: most bytes that `prefetch` may hold on the device.
            staging: pinned ring and streams to use instead of the process's.

        Raises:
            ConfigError: `prefetch_bytes` is no integer >= 0, or PyTorch knows no such device.
        """
        most = as_int(prefetch_bytes)
        if most is None or most < 0:
            raise ConfigError("prefetch_bytes is an integer >= 0", found=repr(prefetch_bytes))
        self.device = _device_of(device)
        self.moved_bytes = 0
        self.pageable_bytes = 0
        self._staging = staging_for(self.device) if staging is None else staging
        self._prefetch_bytes = most
        self._prefetched: OrderedDict[Hashable, list[_Resident]] = OrderedDict()
        self._prefetched_bytes = 0
        self._resident: WeakValueDictionary[tuple[Hashable, str], _Resident] = WeakValueDictionary()

    def encoder_inputs(self, lookups: Sequence[TransferLookup]) -> list[EncoderBatch]:
        """As the function `encoder_inputs`."""
        groups: dict[Hashable, list[tuple[TransferLookup, int, ItemFields]]] = {}
        for entry in _missing(listed(lookups)):
            groups.setdefault(_batch_key(entry[0].request.items[entry[1]].modality, entry[2]), []).append(entry)
        shared: dict[Hashable, FieldValue] = {}
        return [self._batch(group, shared) for group in groups.values()]

    def prefetch(self, lookups: Sequence[PrefetchLookup], num_tokens: int) -> int:
        """Send the payload of items that begin in the `num_tokens` tokens after each window, for a later step.

        Items whose rows are stored or on their way are left out, as are shared fields and items of which only metadata
        is here. What is held is bounded by `prefetch_bytes`: the oldest gives way; an item larger than that is not
        sent. On the CPU there is nothing to do.

        Args:
            lookups: of this step.
            num_tokens: at least 0; what lies beyond a request's end does not matter.

        Returns:
            Bytes sent.

        Raises:
            WindowError: `num_tokens` is no integer >= 0.
        """
        count = as_int(num_tokens)
        if count is None or count < 0:
            raise WindowError("a number of tokens is an integer >= 0", found=repr(num_tokens))
        if self.device.type == "cpu":
            return 0
        before = self.moved_bytes
        for lookup in listed(lookups):
            request, (_, end) = lookup.request, lookup.window
            missing = set(lookup.missing)
            for index in needed_items(request, end, end + count)[2]:
                item = request.items[index]
                begins = item.placeholder.first_row >= end
                if begins and index not in missing and item.fields is not None and not lookup.holds(index):
                    self._prefetch(lookup.key(index), item.fields)
        return self.moved_bytes - before

    def _prefetch(self, key: Hashable, fields: ItemFields) -> None:
        names = [name for name in fields if _is_payload(fields, name) and fields.config(name).layout != "shared"]
        if fields.payload_bytes > self._prefetch_bytes or all((key, name) in self._resident for name in names):
            return
        while self._prefetched_bytes + fields.payload_bytes > self._prefetch_bytes:
            self._forget(next(iter(self._prefetched)))
        sender = Sender(self._staging)
        with _versioned():
            values = {name: sender.move(fields[name]) for name in names}
        arrival = self._count(sender)
        held = {name: _Resident(value, arrival) for name, value in values.items()}
        for name, resident in held.items():
            self._resident[key, name] = resident
        self._prefetched[key] = list(held.values())
        self._prefetched_bytes += fields.payload_bytes

    def _forget(self, key: Hashable) -> None:
        for resident in self._prefetched.pop(key, ()):
            self._prefetched_bytes -= value_bytes(resident.value)

    def _batch(
        self, group: Sequence[tuple[TransferLookup, int, ItemFields]], shared: dict[Hashable, FieldValue]
    ) -> EncoderBatch:
        """The batch of a group; `shared`: values of shared fields that this call has sent already."""
        first_lookup, first_index, _ = group[0]
        modality = first_lookup.request.items[first_index].modality
        places: list[tuple[Any, int]] = [(lookup, index) for lookup, index, _ in group]
        fields = [entry[2] for entry in group]
        if self.device.type == "cpu":
            return EncoderBatch(modality, places, {n: _to_cpu(v) for n, v in join_fields(fields).items()})
        with _versioned():
            return self._sent_batch(modality, places, fields, shared)

    def _sent_batch(
        self,
        modality: str,
        places: list[tuple[Any, int]],
        fields: Sequence[ItemFields],
        shared: dict[Hashable, FieldValue],
    ) -> EncoderBatch:
        first = fields[0]
        kept = join_fields([_kept(item) for item in fields])
        keys = [lookup.key(index) for lookup, index in places]
        kwargs: dict[str, FieldValue] = {}
        parts: list[tuple[Hashable, str, FieldValue]] = []
        sender = Sender(self._staging)
        for name in first:
            if name in kept:
                kwargs[name] = kept[name]
                continue
            if first.config(name).layout == "shared":
                known = (name, first.shared_value(name).key)
                if known not in shared:
                    shared[known] = sender.move(first[name])
                kwargs[name] = shared[known]
                continue
            values = [self._where_it_is(key, name, item[name]) for key, item in zip(keys, fields)]
            joined = sender.join(values, first.config(name), listed=any(item.listed(name) for item in fields))
            kwargs[name] = joined
            parts.extend((key, name, part) for key, part in zip(keys, _parts(joined, values, first.config(name))))
        arrival = self._count(sender)
        held = [_Resident(part, arrival) for _, _, part in parts]
        self._resident.update({(key, name): resident for (key, name, _), resident in zip(parts, held)})
        for key in keys:
            self._forget(key)
        return EncoderBatch(modality, places, kwargs, sender.moved_bytes, held)

    def _count(self, sender: Sender) -> Event:
        """Count what was sent; the event is behind its arrival on the current stream."""
        self.moved_bytes += sender.moved_bytes
        self.pageable_bytes += sender.pageable_bytes
        return self._staging.streams.record()

    def _where_it_is(self, key: Hashable, name: str, value: FieldValue) -> FieldValue:
        """The item's field on the device if it is there and nobody has written to it, else as it is."""
        resident = self._resident.get((key, name))
        if resident is None or not resident.intact:
            return value
        # It may have arrived for another stream than the one that reads it now.
        self._staging.streams.wait(resident.arrival)
        for tensor in leaves(resident.value):
            self._staging.streams.used(tensor)
        return resident.value


def _missing(lookups: Sequence[TransferLookup]) -> Iterator[tuple[TransferLookup, int, ItemFields]]:
    """Lookup, index and fields of the missing items, each content once."""
    seen: set[Hashable] = set()
    found: list[tuple[TransferLookup, int, ItemFields]] = []
    for lookup in lookups:
        bare = []
        for index in lookup.missing:
            key = lookup.key(index)
            if key in seen:
                continue
            seen.add(key)
            fields = lookup.request.items[index].fields
            if fields is None or not any(_is_payload(fields, name) for name in fields):
                bare.append(index)
            else:
                found.append((lookup, index, fields))
        if bare:
            raise MissingContentError(
                f"items {bare} have to be encoded, but only their metadata is here",
                request_id=lookup.request.request_id,
                item=bare[0],
                items=bare,
            )
    return iter(found)


def _is_payload(fields: ItemFields, name: str) -> bool:
    return not fields.config(name).keep_on_cpu


def _batch_key(modality: str, fields: ItemFields) -> Hashable:
    """Equal for items that one batch takes. Metadata of unequal shapes joins to a list, of unequal kinds not at all."""
    metadata = tuple(
        (
            name,
            fields.config(name).layout,
            fields.config(name).dim,
            fields.shared_value(name).key if fields.config(name).layout == "shared" else _dtypes(value),
        )
        for name, value in sorted(fields.items())
        if not _is_payload(fields, name)
    )
    return modality, fields.join_key(payload_only=True), metadata


def _dtypes(value: FieldValue) -> Hashable:
    return value.dtype if isinstance(value, Tensor) else "list"


def _kept(fields: ItemFields) -> ItemFields:
    names = [name for name in fields if not _is_payload(fields, name)]
    return ItemFields(
        {name: fields[name] for name in names},
        {name: fields.config(name) for name in names},
        listed=frozenset(name for name in names if fields.listed(name)),
    )


def _to_cpu(value: FieldValue) -> FieldValue:
    return value.cpu() if isinstance(value, Tensor) else [_to_cpu(entry) for entry in value]


@contextmanager
def _versioned() -> Iterator[None]:
    """What is made in here is a plain tensor: in inference mode, too, PyTorch counts the writes to it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _versions(value: FieldValue) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in leaves(value))


def _parts(joined: FieldValue, values: Sequence[FieldValue], config: FieldConfig) -> Iterator[FieldValue]:
    """The part of each item in a joined field."""
    if isinstance(joined, Tensor):
        if config.layout == "batched":
            yield from joined.unbind(0)
            return
        start = 0
        for value in values:
            size = value.shape[config.dim] if isinstance(value, Tensor) else 0
            yield joined.narrow(config.dim, start, size)
            start += size
        return
    entries = iter(joined)
    for value in values:
        if config.layout == "flat" and isinstance(value, list):
            yield [next(entries) for _ in value]
        else:
            yield next(entries)


def _device_of(name: torch.device | str) -> torch.device:
    """`cuda` as the tensors that are made there name it, `cuda:0`."""
    try:
        device = torch.device(name)
        return device if device.type == "cpu" or device.index is not None else torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError) as error:  # the last: a build without that kind of device
        raise ConfigError("there is no such device here", expected="a device of torch's", found=repr(name)) from error


_transfers: dict[torch.device, Transfer] = {}
_transfers_lock = Lock()


def _transfer_to(device: torch.device) -> Transfer:
    """The process's way to `device`, made at first use."""
    with _transfers_lock:
        transfer = _transfers.get(device)
        if transfer is None:
            transfer = _transfers[device] = Transfer(device)
        return transfer
