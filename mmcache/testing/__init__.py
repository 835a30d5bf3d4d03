"""A simulated device: test code for accelerators on a machine that has none.

Inside the block, tensors that carry the label of the device compute for real, on the CPU, and everything that would
hurt or break on a real device is written down with the file and line of the caller:

    with SimulatedDevice("cuda:0") as sim:
        x = sim.to_device(torch.arange(6.0))        # labelled, not recorded: for setting a test up
        y = x * torch.ones(6, device="cuda:0")      # factories, .to, .cuda, .new_*, module.to(...) know the label
        assert y.device == torch.device("cuda:0")   # so do .device, .is_cuda, .get_device(), .is_pinned()
        y.sum().item()                              # -> sim.host_reads
        x + torch.ones(6)                           # -> sim.mixes (a real device would raise; here the sum is made)
        x.cpu()                                     # -> sim.moves, and sim.host_reads as it blocks
    assert [read.op for read in sim.host_reads] == ["item", "cpu"]

- `sim.host_reads`: `item`, `tolist`, `numpy`, `bool()`, `int()`, `float()`, indexing of Python objects, `nonzero`,
  boolean masks, `masked_select`, `repeat_interleave` without `output_size`, `unique`, `equal`, printing, blocking
  copies to the host ...
- `sim.mixes`: operations over tensors of several devices. 0-dimensional CPU tensors may join in, as they may on a GPU;
  so may CPU indices into a device tensor, which are recorded as a move.
- `sim.moves`: every copy between devices: bytes, direction, `non_blocking`, whether the host side was pinned
  (`pin_memory()`, `pin_memory=True` and `.is_pinned()` work), and `.blocks`: whether the host would have waited.
  Building a device tensor from Python data (`torch.tensor([1], device=...)`) is such a move.
- `sim.name(t, "grid")` follows a value: records name in `.origins` what the tensors they are about were computed from,
  and `sim.touched` holds the names whose values any operation took.
- `sim.clear()` forgets the records; `sim.device_of(t)` tells the device of a tensor outside the block as well;
  `sim.pin(t)` is a copy in pinned memory and `sim.adopt(t)` labels a tensor in place, for setting a test up.

Each record has `.op`, `.where` (file, line, function of the innermost caller outside PyTorch) and more, see `HostRead`,
`Mix` and `Move`. A label belongs to a tensor's storage, so views share it. All tensors are plain `torch.Tensor`s, so
whole models run: build the model, enter the block, `model.to(sim.device)`, call it.

What is not simulated: other threads than the one that entered the block, `torch.cuda.*` (streams, events, memory),
pickling, and kernels that exist on one kind of device only.
"""

from mmcache.testing.device import SimulatedDevice
from mmcache.testing.records import HostRead, Mix, Move, Where

__all__ = ["HostRead", "Mix", "Move", "SimulatedDevice", "Where"]
