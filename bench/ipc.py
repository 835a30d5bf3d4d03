"""What it costs to get a request to a worker process, beside copying the bytes that have to go.

One request of a growing history: 26 images of 560 tokens and float32 `(5040, 768)` each, 15,280 tokens; of these images
all, one or none are new. Timed is the way from the scheduler's call until the worker says that everything is there; the
worker then reads every byte. All paths take turns in one process, medians count: of a turn's first step, which finds
caches as the other paths left them, and of the steps in a row behind it, as an engine makes them. The scheduler has a
core of its own, as far as there are several: else the system at times lets a worker take its core in the middle of a
copy, and an empty round trip within one core costs a fifth of one between two.

    python bench/ipc.py [--rounds 15] [--workers 1] [--images 26]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.util
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import numpy as np
import torch

from mmcache.fields import FieldConfig, ItemFields
from mmcache.ipc import Arena, Receiver, Sender
from mmcache.items import MultimodalItem, MultimodalRequest, PlaceholderRange
from mmcache.ledger import EncoderLedger
from mmcache.planning import StepPlan
from mmcache.policies import make_policy

ROWS, PATCHES, WIDTH = 560, 5040, 768
BEFORE, AFTER = 700, 20
"""Tokens of text, before the first image and after the last."""


def cores() -> tuple[set[int], set[int]]:
    """The scheduler's and the workers'."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others or [first])


SCHEDULER, WORKERS = cores()

CONFIGS = {
    "pixel_values": FieldConfig.flat("image", [slice(0, PATCHES)]),
    "image_grid_thw": FieldConfig.batched("image", keep_on_cpu=True),
}


# -- the workers: each says when it has everything, then reads every byte, and says when it is done with it ------------


def read(pixels: torch.Tensor | np.ndarray[Any, Any]) -> None:
    """Touch every byte."""
    np.add.reduce(np.asarray(pixels).reshape(-1).view(np.int64))


def until_end(own: set[int], target: Callable[..., None], *arguments: Any) -> None:
    os.sched_setaffinity(0, own)
    torch.set_num_threads(1)
    gc.freeze()  # as engines do: a full collection looks at every object of torch
    with contextlib.suppress(EOFError, OSError):
        target(*arguments)


def mmcache_worker(channel: Connection, side: Connection, name: str) -> None:
    receiver = Receiver(channel, name)
    while True:
        step = receiver.next(None)
        if step is None:
            continue
        part = step.parts[0]
        here = part.token_ids, part.metadata("image_grid_thw"), [part.fields(index) for index in part.missing]
        side.send_bytes(b"")
        for fields in here[2]:
            read(fields["pixel_values"])
        fields = here = part = None
        step.done()


def pickle_worker(channel: Connection, side: Connection, name: str) -> None:
    while True:
        data = channel.recv_bytes()
        buffers = [channel.recv_bytes() for _ in range(int.from_bytes(data[:4], "little"))]
        request = pickle.loads(data[4:], buffers=buffers)
        side.send_bytes(b"")
        if request is None:
            return
        for item in request["items"]:
            if "pixel_values" in item:
                read(item["pixel_values"])
        request = item = None
        side.send_bytes(b"")


class VllmItem(msgspec.Struct):
    """An item as vLLM's front end would hand it on: tensors, None where they were stripped."""

    id: str
    place: tuple[int, int]
    grid: torch.Tensor
    pixels: torch.Tensor | None


class VllmRequest(msgspec.Struct):
    """A request as vLLM passes it: tokens are a list of numbers."""

    id: str
    tokens: list[int]
    items: list[VllmItem]


def msgpack_worker(channel: Connection, side: Connection, name: str) -> None:
    import zmq
    from vllm.v1.serial_utils import MsgpackDecoder

    socket = zmq.Context().socket(zmq.PULL)
    socket.bind(name)
    decoder = MsgpackDecoder(VllmRequest)
    side.send_bytes(b"")
    while True:
        request = decoder.decode(socket.recv_multipart(copy=False))
        side.send_bytes(b"")
        for item in request.items:
            if item.pixels is not None:
                read(item.pixels)
        request = item = None
        side.send_bytes(b"")


def queue_worker(channel: Connection, side: Connection, name: str) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    queue = MessageQueue.create_from_handle(channel.recv(), 0)
    queue.wait_until_ready()
    while True:
        request = queue.dequeue()
        side.send_bytes(b"")
        for item in request["items"]:
            if item["pixels"] is not None:
                read(item["pixels"])
        request = item = None
        side.send_bytes(b"")


class VllmWays:
    """vLLM's own transports, where it is installed: MessagePack over ZeroMQ, and its message queue."""

    def __init__(self, folder: str) -> None:
        import zmq
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
        from vllm.v1.serial_utils import MsgpackEncoder

        address = f"ipc://{folder}/msgpack"
        _, self.msgpack_side = spawn(msgpack_worker, address)
        self.msgpack_side.recv_bytes()
        self.socket = zmq.Context().socket(zmq.PUSH)
        self.socket.connect(address)
        self.encoder = MsgpackEncoder()
        self.queues: dict[str, tuple[Any, Connection]] = {}
        for name, arena in (("MessageQueue", False), ("MessageQueue + tensor arena", True)):
            queue = MessageQueue(1, 1, enable_shm_tensor_arena=arena)
            channel, side = spawn(queue_worker)
            channel.send(queue.export_handle())
            queue.wait_until_ready()
            self.queues[name] = (queue, side)

    def ways(self, request: MultimodalRequest, new: int) -> dict[str, tuple[Callable[[], object], Connection]]:
        """Each way to bring this request to its worker, and where that says when it has read all."""
        first = len(request.items) - new
        items = [
            VllmItem(
                item.identifier,
                (item.placeholder.offset, item.placeholder.length),
                item.fields["image_grid_thw"],
                item.fields["pixel_values"] if index >= first else None,
            )
            for index, item in enumerate(request.items)
        ]
        message = VllmRequest(request.request_id, request.token_ids.tolist(), items)
        plain = {**msgspec.structs.asdict(message), "items": [msgspec.structs.asdict(item) for item in items]}

        def msgpack() -> None:
            self.socket.send_multipart(self.encoder.encode(message), copy=False)
            self.msgpack_side.recv_bytes()

        def enqueue(queue: Any, side: Connection) -> None:
            queue.enqueue(plain)
            side.recv_bytes()

        ways: dict[str, tuple[Callable[[], object], Connection]] = {
            "vLLM msgpack, ZeroMQ": (msgpack, self.msgpack_side)
        }
        for name, ends in self.queues.items():
            ways[f"vLLM {name}"] = partial(enqueue, *ends), ends[1]
        return ways


def echo_worker(channel: Connection, side: Connection, name: str) -> None:
    while True:
        channel.recv_bytes()
        side.send_bytes(b"")


# -- the scheduler's side ----------------------------------------------------------------------------------------------


class Workload:
    """Requests of `images` images, the last `new` of which are not covered."""

    def __init__(self, images: int) -> None:
        self.images = images
        self.payload = [torch.rand(PATCHES, WIDTH) for _ in range(images)]
        self.tokens = np.arange(BEFORE + images * ROWS + AFTER, dtype=np.int32)
        self.serial = 0

    def request(self, name: str | None = None) -> MultimodalRequest:
        """A request whose contents nobody has seen."""
        self.serial += 1
        items = []
        for index, pixels in enumerate(self.payload):
            fields = ItemFields({"pixel_values": pixels, "image_grid_thw": torch.tensor([1, 72, 70])}, CONFIGS)
            place = PlaceholderRange(BEFORE + index * ROWS, ROWS)
            items.append(MultimodalItem("image", fields, place, f"{self.serial:024x}{index:08x}"))
        return MultimodalRequest(name or f"request {self.serial}", self.tokens, items)

    def computed(self, new: int) -> int:
        """Tokens whose KV exists: all before the first new image, or all but the question."""
        return BEFORE + (self.images - new) * ROWS

    def plain(self, request: MultimodalRequest, new: int) -> dict[str, Any]:
        """The same for a pickle: what is covered is stripped already, tokens are one buffer."""
        items: list[dict[str, Any]] = []
        for index, item in enumerate(request.items):
            place = (item.placeholder.offset, item.placeholder.length)
            entry: dict[str, Any] = {
                "id": item.identifier,
                "place": place,
                "grid": item.fields["image_grid_thw"].numpy(),
            }
            if index >= self.images - new:
                entry["pixel_values"] = item.fields["pixel_values"].numpy()
            items.append(entry)
        return {"id": request.request_id, "tokens": request.token_ids, "items": items}


class Mmcache:
    """The sender and its workers."""

    def __init__(self, workload: Workload, workers: int, capacity: int) -> None:
        self.workload = workload
        self.arena = Arena(capacity)
        self.sender = Sender(self.arena)
        self.ledger = EncoderLedger(1 << 40, make_policy("lru"), row_bytes={"image": 4096})
        self.sides = []
        for number in range(workers):
            channel, side = spawn(mmcache_worker, str(number))
            self.sender.add(str(number), channel)
            self.sides.append(side)
        while not all(self.sender.workers.values()):
            self.sender.poll()
            time.sleep(0.001)

    def prepare(self, new: int) -> tuple[MultimodalRequest, StepPlan]:
        request = self.workload.request()
        return request, self.ledger.plan(request, num_computed_tokens=self.workload.computed(new))

    def run(self, prepared: tuple[MultimodalRequest, StepPlan]) -> None:
        self.sender.send([prepared])
        for side in self.sides:
            side.recv_bytes()

    def settle(self, prepared: tuple[MultimodalRequest, StepPlan]) -> None:
        """After the clock: the step ends, memory comes back."""
        while self.sender.stats().under_way:
            self.sender.poll()
            time.sleep(0)  # let the workers run, without falling asleep between the rounds
        self.ledger.release(prepared[1])
        self.ledger.finish(prepared[0].request_id)
        self.sender.finish(prepared[0])


def spawn(target: Callable[..., None], name: str = "") -> tuple[Connection, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    side, their_side = context.Pipe()
    context.Process(target=until_end, args=(WORKERS, target, theirs, their_side, name), daemon=True).start()
    theirs.close()
    their_side.close()
    return ours, side


def send_pickle(channel: Connection, value: Any, out_of_band: bool) -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append if out_of_band else None)
    channel.send_bytes(len(buffers).to_bytes(4, "little") + data)
    for buffer in buffers:
        channel.send_bytes(buffer.raw())


def clock(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(rounds: int, images: int) -> None:
    workload = Workload(images)
    bytes_each = PATCHES * WIDTH * 4
    ours = Mmcache(workload, 1, 2 * images * bytes_each)
    vllm = VllmWays(tempfile.mkdtemp()) if importlib.util.find_spec("vllm") else None
    in_band, out_of_band = spawn(pickle_worker), spawn(pickle_worker)
    echo, echo_side = spawn(echo_worker)
    # As large as the arena, so that a copy into it meets caches as cold as ours do.
    target = np.ones(2 * images * bytes_each, np.uint8)
    position = 0
    times: dict[tuple[str, str, str], list[float]] = {}

    def memcpy(new: int) -> None:
        nonlocal position
        for pixels in workload.payload[images - new :]:
            if position + bytes_each > target.nbytes:
                position = 0
            ctypes.memmove(target.ctypes.data + position, pixels.data_ptr(), bytes_each)
            position += bytes_each

    def round_trip() -> None:
        echo.send_bytes(b"")
        echo_side.recv_bytes()

    def pickled(channel: Connection, side: Connection, value: Any, oob: bool) -> None:
        send_pickle(channel, value, oob)
        side.recv_bytes()

    def ours_in_a_row(new: int, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            prepared = ours.prepare(new)
            seconds.append(clock(partial(ours.run, prepared)))
            ours.settle(prepared)
        return seconds

    def in_a_row(count: int, call: Callable[[], object], done: Connection | None = None) -> list[float]:
        seconds = []
        for _ in range(count):
            seconds.append(clock(call))
            if done is not None:
                done.recv_bytes()  # it has read all: what comes next is alone on the machine
        return seconds

    cases = (("all new", images, 1), ("one new", 1, 8), ("none new", 0, 20))
    for case, new, count in cases:
        for number in range(rounds + 2):
            request = workload.request()
            plain = workload.plain(request, new)
            limits = {"empty round trip": round_trip, "memcpy": partial(memcpy, new)}
            before = {limit: in_a_row(count, call) for limit, call in limits.items()}
            found = {"mmcache": ours_in_a_row(new, count)}
            # The lower one counts: the system still takes back what the paths of the round before have freed.
            for limit, call in limits.items():
                found[limit] = list(map(min, before[limit], in_a_row(count, call)))
            for way, ends, oob in (("out of band", out_of_band, True), ("in band", in_band, False)):
                found[f"pickle 5, {way}"] = in_a_row(count, partial(pickled, *ends, plain, oob), ends[1])
            for way, (call, side) in ({} if vllm is None else vllm.ways(request, new)).items():
                found[way] = in_a_row(count, call, side)
            if number >= 2:
                for way, seconds in found.items():
                    times.setdefault((case, "after others", way), []).append(seconds[0])
                    if count > 1:
                        times.setdefault((case, "in a row", way), []).append(statistics.median(seconds[1:]))
    for case, when in dict.fromkeys(key[:2] for key in times):
        base = "empty round trip" if case == "none new" else "memcpy"
        floor = times[case, when, base]
        for way in [
            key[2] for key in times if key[:2] == (case, when) and key[2] not in ("memcpy", "empty round trip")
        ]:
            ratio = statistics.median(one / other for one, other in zip(times[case, when, way], floor))
            ms, base_ms = (1e3 * statistics.median(values) for values in (times[case, when, way], floor))
            print(f"{case:9} {when:13} {way:32} {ms:9.3f} ms {ratio:7.2f} x {base} ({base_ms:.3f} ms)")
    ours.arena.close()


def fan_out(rounds: int, images: int, workers: int) -> None:
    """The sender's own CPU time and the bytes written, for one worker and for several."""
    workload = Workload(images)
    capacity = 2 * images * PATCHES * WIDTH * 4
    crews = {count: Mmcache(workload, count, capacity) for count in (1, workers)}
    for case, new in (("all new", images), ("one new", 1), ("none new", 0)):
        cost: dict[int, list[float]] = {count: [] for count in crews}
        written: dict[int, int] = {}
        for _ in range(rounds):
            for count, crew in crews.items():
                prepared = crew.prepare(new)
                before, start = crew.arena.stats().written, time.process_time()
                crew.sender.send([prepared])
                cost[count].append(time.process_time() - start)
                written[count] = crew.arena.stats().written - before
                for side in crew.sides:
                    side.recv_bytes()
                crew.settle(prepared)
        medians = {count: statistics.median(values) for count, values in cost.items()}
        print(
            f"{case:9} {workers} workers: sender's CPU time {medians[workers] / medians[1]:.2f} x that of one "
            f"({medians[workers] * 1e3:.3f} against {medians[1] * 1e3:.3f} ms), bytes written {written}"
        )
    for crew in crews.values():
        crew.arena.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.sched_setaffinity(0, SCHEDULER)
    gc.freeze()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--images", type=int, default=26)
    arguments = parser.parse_args()
    compare(arguments.rounds, arguments.images)
    fan_out(arguments.rounds, arguments.images, arguments.workers)
