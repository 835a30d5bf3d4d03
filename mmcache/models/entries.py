"""What is known of a model family: its fields, their layout and place, and how that is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from mmcache.models.sizes import Sizes

__all__ = [
    "NOT_IN_TRANSFORMERS",
    "REMOTE_CODE",
    "B",
    "Consumer",
    "Evidence",
    "F",
    "Family",
    "FieldEntry",
    "S",
    "Table",
    "declared",
    "kept",
    "tables",
]

Consumer: TypeAlias = Literal["transformers", "vllm"]


@dataclass(frozen=True, slots=True)
class FieldEntry:
    """One field of a family.

    Attributes:
        name, modality: of the field.
        layout: "batched", "flat" or "shared".
        keep_on_cpu: the consumer reads it on the CPU.
        sizes: of a flat field, how many entries each item owns.
        dim: of a flat field, the dimension that is cut.
        moved: the consumer itself moves a `keep_on_cpu` field to the device when it needs it there.
        declared: in a proved table, a field that no consumer was run with (clients' embeddings, names of another
            consumer).
    """

    name: str
    modality: str
    layout: Literal["batched", "flat", "shared"]
    keep_on_cpu: bool = False
    sizes: Sizes | None = None
    dim: int = 0
    moved: bool = False
    declared: bool = False


def B(name: str, modality: str, *, cpu: bool = False, moved: bool = False) -> FieldEntry:
    """A batched field."""
    return FieldEntry(name, modality, "batched", cpu, moved=moved)


def kept(modality: str, *names: str) -> tuple[FieldEntry, ...]:
    """Batched fields that stay on the CPU."""
    return tuple(B(name, modality, cpu=True) for name in names)


def F(name: str, modality: str, sizes: Sizes, dim: int = 0, *, cpu: bool = False, moved: bool = False) -> FieldEntry:
    """A flat field."""
    return FieldEntry(name, modality, "flat", cpu, sizes, dim, moved)


def S(name: str, modality: str, *, cpu: bool = False) -> FieldEntry:
    """A field that all items of a batch share."""
    return FieldEntry(name, modality, "shared", cpu)


def declared(*entries: FieldEntry) -> tuple[FieldEntry, ...]:
    """Fields of a proved table that are not proved themselves."""
    return tuple(replace(entry, declared=True) for entry in entries)


@dataclass(frozen=True, slots=True)
class Evidence:
    """How the placements of a table are known.

    Attributes:
        kind: "proved": the audit ran the consumer, in this project's tests; "declared": taken from `source`.
        consumer, version: what consumes the fields, and the version that was run or read.
        attention: attention implementations that were run.
        source: where a declared table comes from.
        why: why it is not proved here.
    """

    kind: Literal["proved", "declared"]
    consumer: Consumer
    version: str
    attention: tuple[str, ...] = ()
    source: str = ""
    why: str = ""

    def __str__(self) -> str:
        if self.kind == "proved":
            return f"proved: {self.consumer} {self.version}, attention {' and '.join(self.attention)}"
        return f"declared: {self.source}; not proved, as {self.why}"


@dataclass(frozen=True, slots=True)
class Table:
    """The fields of a family as one consumer takes them, and the evidence for their places.

    Attributes:
        others: modality that unlisted fields belong to, where a consumer takes whatever its processor makes; None
            where an unlisted field is a surprise.
    """

    fields: tuple[FieldEntry, ...]
    evidence: Evidence
    note: str = ""
    others: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    Attributes:
        title: its name in tables.
        names: the Hugging Face `model_type`s and architectures that it goes by; the first is its own.
        tables: by consumer.
    """

    title: str
    names: tuple[str, ...]
    tables: Mapping[str, Table]


_TRANSFORMERS = "5.24.0"
_VLLM = "0.33.0"
_NOT_RUN = "the audit runs models of transformers, not this consumer's own model code"
NOT_IN_TRANSFORMERS = f"transformers {_TRANSFORMERS} has no such class"
REMOTE_CODE = "its model is remote code, which is not run here"


def tables(
    transformers: tuple[FieldEntry, ...],
    vllm: tuple[FieldEntry, ...] | None = None,
    *,
    attention: tuple[str, ...] = ("sdpa", "eager"),
    why: str = "",
    vllm_version: str = _VLLM,
    note: str = "",
    vllm_note: str = "",
) -> dict[str, Table]:
    """The tables of a family for both consumers.

    Args:
        transformers: fields as transformers takes them.
        vllm: fields as vLLM takes them, where they differ.
        attention: attention implementations that the audit runs with transformers.
        why: why it does not, if it does not; the fields are then those that vLLM declares.
        vllm_version: the version whose source was read.
        note, vllm_note: remarks for the documentation.
    """
    source = f"the source of vLLM {vllm_version}"
    if why:
        first = Evidence("declared", "transformers", _TRANSFORMERS, (), f"{source}, whose names it keeps", why)
    else:
        first = Evidence("proved", "transformers", _TRANSFORMERS, attention)
    second = Evidence("declared", "vllm", vllm_version, (), source, _NOT_RUN)
    return {
        "transformers": Table(transformers, first, note),
        "vllm": Table(transformers if vllm is None else vllm, second, vllm_note or (note if vllm is None else "")),
    }
