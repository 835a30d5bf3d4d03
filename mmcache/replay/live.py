"""Replaying a chat trace on a real model, with the cache and without it, turn by turn."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mmcache.errors import MediaError, TraceError
from mmcache.replay.chat import ChatTurn

if TYPE_CHECKING:
    from mmcache.engines.transformers import Adapter, Generation, TurnAccount

__all__ = ["LOGIT_TOLERANCE", "LiveReplay", "Measures", "TurnResult", "replay_live"]

LOGIT_TOLERANCE = 1e-4
"""Beyond this difference of float32 logits the two runs do not agree."""

_SKIPPED = ("covered", "stored", "in_flight", "later")


@dataclass(slots=True)
class Measures:
    """What one turn, or all turns, cost.

    Attributes:
        prompt_tokens, prefix_tokens: tokens of the prompt, and those whose keys and values existed already.
        items: number of items by status: covered, stored, in_flight, missing.
        bytes: bytes of their fields: transferred, kept_on_cpu, and skipped because covered, stored, in_flight or later.
        preprocessed: images (or clips) that were decoded and preprocessed.
        encoder_runs: images (or clips) that ran through the encoder.
        ttft: seconds to the first token.
    """

    prompt_tokens: int = 0
    prefix_tokens: int = 0
    items: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    preprocessed: int = 0
    encoder_runs: int = 0
    ttft: float = 0.0

    def __add__(self, other: Measures) -> Measures:
        return Measures(
            self.prompt_tokens + other.prompt_tokens,
            self.prefix_tokens + other.prefix_tokens,
            {name: self.items.get(name, 0) + other.items.get(name, 0) for name in {**self.items, **other.items}},
            {name: self.bytes.get(name, 0) + other.bytes.get(name, 0) for name in {**self.bytes, **other.bytes}},
            self.preprocessed + other.preprocessed,
            self.encoder_runs + other.encoder_runs,
            self.ttft + other.ttft,
        )


@dataclass(slots=True)
class TurnResult:
    """One turn of a trace, run with the cache (unless left out) and without.

    Attributes:
        line, conversation, timestamp: as in the trace.
        cached: with mmcache; None where it was left out.
        plain: without a cache.
        tokens: the tokens that were generated.
        logit_difference: the largest absolute difference of logits between the two runs, over the generated tokens.
        same_tokens: whether both runs generated the same tokens.
    """

    line: int
    conversation: str
    timestamp: float | None
    plain: Measures
    tokens: list[int]
    cached: Measures | None = None
    logit_difference: float | None = None
    same_tokens: bool | None = None


@dataclass(slots=True)
class LiveReplay:
    """The turns of a replayed trace.

    Attributes:
        trace: its path.
        model: the model's family.
        turns: in the order of the trace.
    """

    trace: str
    model: str
    turns: list[TurnResult] = field(default_factory=list)

    @property
    def plain(self) -> Measures:
        """All turns without a cache."""
        return sum((turn.plain for turn in self.turns), Measures())

    @property
    def cached(self) -> Measures | None:
        """All turns with mmcache; None where it was left out."""
        if any(turn.cached is None for turn in self.turns):
            return None
        return sum((turn.cached for turn in self.turns if turn.cached is not None), Measures())

    @property
    def logit_difference(self) -> float | None:
        """The largest difference of logits over all turns, or None where only one run was made."""
        found = [turn.logit_difference for turn in self.turns if turn.logit_difference is not None]
        return max(found) if found else None

    @property
    def equal(self) -> bool | None:
        """Whether both runs generated the same tokens, logits within `LOGIT_TOLERANCE`; None without a cached run."""
        difference = self.logit_difference
        if difference is None:
            return None
        return difference <= LOGIT_TOLERANCE and all(turn.same_tokens is not False for turn in self.turns)

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values; bytes in bytes, times in seconds."""
        import torch
        import transformers

        cached = self.cached
        return {
            "trace": self.trace,
            "model": self.model,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "turns": [asdict(turn) for turn in self.turns],
            "totals": {"cached": asdict(cached) if cached is not None else None, "plain": asdict(self.plain)},
            "largest_logit_difference": self.logit_difference,
            "equal": self.equal,
        }


def replay_live(
    turns: Sequence[ChatTurn],
    *,
    trace: str,
    model: str = "qwen2_5_vl",
    use_cache: bool = True,
    max_new_tokens: int = 4,
    on_turn: Callable[[TurnResult], None] = lambda turn: None,
) -> LiveReplay:
    """Run every turn of a chat trace on a tiny model of a family.

    Args:
        turns: of the trace, in order.
        trace: name of the trace, for the report.
        model: one of `mmcache.engines.transformers.FAMILIES`.
        use_cache: also run with mmcache, and compare.
        max_new_tokens: tokens to generate each turn.
        on_turn: told of every finished turn.

    Raises:
        TraceError: a turn holds media that cannot be decoded, or that the model does not take.
        ConfigError: no such model, or transformers is missing.
    """
    from mmcache.engines.transformers import default_engine, run_plain, tiny_adapter

    adapter = tiny_adapter(model)
    engine = default_engine(adapter) if use_cache else None
    result = LiveReplay(trace, model)
    _warm_up(adapter, turns)
    for turn in turns:
        try:
            cached = None
            if engine is not None:
                running = engine.submit(turn.messages, request_id=f"line {turn.line}", max_new_tokens=max_new_tokens)
                engine.run([running])
                cached = _cached_measures(running.generation, running.account)
            plain = run_plain(adapter, turn.messages, max_new_tokens=max_new_tokens)
        except MediaError as error:
            raise TraceError(error.message, path=trace, line=turn.line, found=error.found) from error
        row = TurnResult(turn.line, turn.conversation, turn.timestamp, _plain_measures(plain), plain.tokens, cached)
        if engine is not None:
            row.same_tokens = plain.tokens == running.generation.tokens
            row.logit_difference = max(_differences(plain, running.generation))
        result.turns.append(row)
        on_turn(row)
    return result


def _warm_up(adapter: Adapter, turns: Sequence[ChatTurn]) -> None:
    """The first prompt once, unmeasured: imports and first allocations are no run's time to first token."""
    from mmcache.engines.transformers import run_plain

    with suppress(MediaError):  # reported when its turn comes
        run_plain(adapter, turns[0].messages if turns else (), max_new_tokens=1)


def _differences(plain: Generation, cached: Generation) -> Iterator[float]:
    # After a token that differs the two runs answer different prompts, and their logits say nothing any more.
    for before, after, token, other in zip(plain.logits, cached.logits, plain.tokens, cached.tokens):
        yield float((before - after).abs().max())
        if token != other:
            return


def _plain_measures(generation: Generation) -> Measures:
    skipped = dict.fromkeys(_SKIPPED, 0)
    return Measures(
        generation.prompt_tokens,
        0,
        {"covered": 0, "stored": 0, "in_flight": 0, "missing": generation.encoder_runs},
        {"transferred": generation.bytes_moved, "kept_on_cpu": 0, **skipped},
        generation.preprocessed,
        generation.encoder_runs,
        generation.ttft,
    )


def _cached_measures(generation: Generation, account: TurnAccount) -> Measures:
    return Measures(
        generation.prompt_tokens,
        account.prefix_tokens,
        dict(account.items),
        {"later": 0, **account.bytes},
        generation.preprocessed,
        generation.encoder_runs,
        generation.ttft,
    )
