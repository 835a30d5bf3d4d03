"""A shared field's value: what makes two of them one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from mmcache.fields.values import FieldValue, content_of, on_cpu, owned_value, shape_of

__all__ = ["SharedValue"]


class SharedValue:
    """A value that items have in common, and the key by which it is known again.

    The items that one `split_fields` made hold one `SharedValue`, so that its bits are read once for all of them.

    Attributes:
        value: the value.
    """

    __slots__ = ("_key", "_owned", "value")

    def __init__(self, value: FieldValue) -> None:
        self.value = value
        self._key: Hashable = None
        self._owned: SharedValue | None = None

    @property
    def key(self) -> Hashable:
        """Equal for values of equal dtype, shape and bits; of a value on a device, whose bits nobody waits for, for it.

        It keeps no tensor on the CPU alive, and means the same in another process.
        """
        if self._key is None:
            if not on_cpu(self.value):
                return self
            self._key = content_of(self.value)
        return self._key

    def owned(self) -> SharedValue:
        """The value in memory of its own: copied once, whoever asks."""
        if self._owned is None:
            value = owned_value(self.value)
            if value is self.value:
                return self
            self._owned = SharedValue(value)
        return self._owned

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedValue) and self.value is other.value

    def __hash__(self) -> int:
        return hash(shape_of(self.value))  # not the address, which another process does not know

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedValue, (self.value,)
