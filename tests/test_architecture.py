"""The floors of the house: a room imports from rooms below it or beside it, without cycles, and no extra on import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mmcache

PACKAGE = Path(mmcache.__file__).parent

FLOORS = [
    {"errors", "fields", "integers", "native", "testing"},
    {"items", "hashing", "policies", "stats", "namespaces", "identity"},
    {"planning", "prefix", "features", "tiers", "models", "staging"},
    {"ledger", "store", "transfer", "merge"},
    {"cache", "ipc"},
    {"engines", "audit"},
    {"cli", "metrics", "replay"},
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

EXTRAS = ["PIL", "blake3", "mooncake", "msgspec", "prometheus_client", "redis", "rich", "transformers", "vllm", "zmq"]


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_imported(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "mmcache" else [f"mmcache.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("mmcache.") and name != "mmcache.__version__"}
    return rooms


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in modules()} == set(FLOOR_OF)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_or_sideways(path: Path) -> None:
    room = room_of(path)
    above = {other for other in rooms_imported(path) if FLOOR_OF[other] > FLOOR_OF[room]}
    assert not above, f"{room} is on floor {FLOOR_OF[room]} and imports from above: {sorted(above)}"


def test_rooms_have_no_cycles() -> None:
    uses: dict[str, set[str]] = {room: set() for room in FLOOR_OF}
    for path in modules():
        uses[room_of(path)] |= rooms_imported(path) - {room_of(path)}
    done: set[str] = set()
    while ready := {room for room in uses if room not in done and uses[room] <= done}:
        done |= ready
    assert done == set(uses), f"these rooms import each other in a circle: {sorted(set(uses) - done)}"


def test_importing_the_package_pulls_in_no_extra() -> None:
    code = f"import sys, mmcache; print(sorted(m for m in {EXTRAS!r} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert result.stdout.strip() == "[]"


def test_every_public_name_is_documented() -> None:
    missing = [name for name in mmcache.__all__ if not (getattr(mmcache, name).__doc__ or "").strip()]
    assert missing == []


def test_errors_have_one_base() -> None:
    import mmcache.errors as errors

    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(kinds) > 15
    assert all(issubclass(kind, mmcache.MMCacheError) for kind in kinds)


def test_other_exceptions_are_not_defined_elsewhere() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Error"):
                assert room_of(path) == "errors", f"{path.name} defines {node.name}"
