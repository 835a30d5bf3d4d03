"""The symmetric half of `keep_on_cpu`: a consumer that wants such a field on the device after all."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["OnDevice"]


class OnDevice:
    """Moves tensors to a device when they are asked for: without waiting, once each, and only then.

    One of them serves one step: it holds what it moved, and forgets it with itself.

        on_device = OnDevice(model.device)
        grid = fields["image_grid_thw"]                 # sizes are read on the CPU: grid.tolist()
        x = rotary(pixels, on_device(grid))             # and only where the device needs it, a copy goes there

    Attributes:
        device: where tensors go.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        # The original is held too, so that its id is not used again by another tensor.
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """`tensor` on the device: itself if it lies there, else a copy that the host does not wait for.

        A tensor that was written to since it was moved is moved again (one of inference mode is not).
        """
        if tensor.device == self.device or (self.device.index is None and tensor.device.type == self.device.type):
            return tensor
        # Tensors of inference mode do not count writes.
        version = 0 if tensor.is_inference() else tensor._version
        held = self._copies.get(id(tensor))
        if held is not None and held[1] == version:
            return held[2]
        source = tensor
        if tensor.device.type == "cpu" and self.device.type == "cuda" and not tensor.is_pinned():
            # Out of pageable memory the host would wait; PyTorch keeps a pinned block until the copy is done.
            source = tensor.contiguous().pin_memory()
        copy = source.to(self.device, non_blocking=True)
        self._copies[id(tensor)] = (tensor, version, copy)
        return copy
