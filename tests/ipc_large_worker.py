"""A worker process that compares megabytes of payload with their source, and keeps some of it beyond its step."""

from __future__ import annotations

import traceback
from multiprocessing.connection import Connection

import torch
from torch import Tensor

import mmcache.ipc.receiver
from mmcache.errors import ConfigError, MessageError
from mmcache.fields import FieldConfig
from mmcache.ipc import Receiver

NUMBERS = 300_000
CONTENT_BYTES = 4 * NUMBERS
CONTENTS = 12
CONFIGS = {"pixels": FieldConfig.batched("image")}


def source(content: int) -> Tensor:
    """1.2 MB, no stretch of which is like another's."""
    return torch.arange(NUMBERS, dtype=torch.int32) * (2 * content + 1) + content


def work(name: str, connection: Connection, answers: Connection) -> None:
    """Compare all that comes with its source, and keep the last tensor beyond its step."""
    torch.set_num_threads(1)
    if name == "far":

        def fail(path: str, epoch: int) -> None:
            raise ConfigError("no arena can be attached here", found=path)

        mmcache.ipc.receiver.ArenaReader = fail  # type: ignore[assignment,misc]
    receiver = Receiver(connection, name, reads_payload=name != "later stage")
    kept = None
    try:
        while True:
            try:
                step = receiver.next(None)
            except MessageError as error:
                if "not in the arena" not in str(error):
                    raise
                receiver.reset()  # the copy was interrupted
                continue
            read = []
            with step:
                for part in step.parts:
                    for index in part.missing if name != "later stage" else ():
                        content = int(part.plan.items[index].identifier)
                        pixels = part.fields(index)["pixels"]
                        assert torch.equal(pixels, source(content)), f"{content} was read wrongly"
                        if kept is not None:
                            assert torch.equal(kept[1], source(kept[0])), "what was kept has changed"
                        kept = content, pixels
                        read.append(content)
                        del pixels
                answers.send((name, step.number, read))
            del step, part
    except (EOFError, OSError):
        return
    except BaseException:
        answers.send(traceback.format_exc())
        raise
