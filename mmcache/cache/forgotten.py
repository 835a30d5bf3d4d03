"""What a cache has forgotten and its tiers may still hold."""

from __future__ import annotations

from itertools import chain, islice

from mmcache.tiers import Key, TieredStore

__all__ = ["Forgotten"]

_CONTENTS = 1 << 12
"""Forgotten contents that are remembered one by one. Whoever has missed more than that begins anew in the tiers."""

_PLACES = 1 << 16
"""Modalities of namespaces of which it is remembered how much of what was forgotten has gone from there."""

_AT_ONCE = 1 << 8
"""Of these the latest, from which things go when they are forgotten; from others when they come by again."""

_MODALITIES = ("image", "video", "audio")
"""What other processes may have stored an identifier under, whatever came by here."""


class Forgotten:
    """Takes what was forgotten out of the tiers before anybody looks for it there, for any number of salts.

    Forgettings are numbered. Of each place, a modality of a namespace fingerprint (which has the salt and the adapter
    in it), it is remembered up to which number it is clean. A place that is not known, being new or not seen for long,
    counts as never cleaned: what is good of it may go as well, which is slower and not wrong.

    No lock here: `TierLink` holds its own around all calls but `clean` and `since`.
    """

    def __init__(self, tiers: TieredStore) -> None:
        self.number = 0
        self._tiers = tiers
        self._cleared = 0  # all contents were forgotten at this number
        self._contents: dict[str, int] = {}  # at which number others were, the latest last
        # The modality "" stands for all of a namespace. What is in use is always among the younger ones.
        self._young: dict[tuple[str, str], int] = {}
        self._old: dict[tuple[str, str], int] = {}

    def clean(self, key: Key) -> bool:
        """Whether nothing that was forgotten can be at the key's place."""
        return self._young.get((key.namespace, key.modality)) == self.number

    def since(self, identifier: str, number: int) -> bool:
        """Whether the content, as keys name it, was forgotten later than at that number."""
        return max(self._cleared, self._contents.get(identifier, 0)) > number

    def catch_up(self, key: Key) -> None:
        """Take from the key's place what was forgotten since it was last clean."""
        all_of_it, place = (key.namespace, ""), (key.namespace, key.modality)
        cleared = self._done(all_of_it)
        done = max(cleared, self._done(place))
        if done < self._cleared:
            self._tiers.clear(key.namespace)
            cleared = self.number
        elif missed := self._missed(done):
            self._tiers.remove([Key(key.namespace, identifier, key.modality) for identifier in missed])
        if cleared:
            self._young[all_of_it] = cleared
        self._young[place] = self.number
        if len(self._young) > _PLACES // 2:
            self._old, self._young = self._young, {}

    def forget(self, identifier: str | None) -> None:
        """A content, or everything, is forgotten now: it goes from the places seen last, and from others in time."""
        self.number += 1
        latest = list(islice(chain(reversed(self._young), reversed(self._old)), _AT_ONCE))
        here = self._tiers.key("any", "").namespace
        namespaces = dict.fromkeys((here, *(namespace for namespace, _ in latest)))
        if identifier is None:
            self._cleared = self.number
            self._contents.clear()
            for namespace in namespaces:
                self._tiers.clear(namespace)
                self._young[namespace, ""] = self.number
            return
        named = self._tiers.key(identifier, "").identifier
        self._contents.pop(named, None)
        self._contents[named] = self.number
        if len(self._contents) > _CONTENTS:
            self._cleared = self._contents.pop(next(iter(self._contents)))
        modalities = dict.fromkeys((*_MODALITIES, *(modality for _, modality in latest if modality)))
        self._tiers.remove([Key(namespace, named, modality) for namespace in namespaces for modality in modalities])
        for place in latest:
            marks = self._young if place in self._young else self._old
            if place[1] and marks[place] == self.number - 1:
                marks[place] = self.number

    def _done(self, place: tuple[str, str]) -> int:
        return max(self._young.get(place, 0), self._old.get(place, 0))

    def _missed(self, done: int) -> list[str]:
        """Contents that were forgotten later than at that number."""
        missed = []
        for identifier in reversed(self._contents):
            if self._contents[identifier] <= done:
                break
            missed.append(identifier)
        return missed
