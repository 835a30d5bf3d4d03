"""Building a source of the compiled part by itself, with every warning an error."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from mmcache import native

CHECKED = ["-O3", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror"]


def build(name: str, folder: Path, *flags: str) -> Any:
    """The module of that name, built in a folder; skips where that cannot be."""
    source = Path(native.__file__).with_name(f"{name}.c")
    headers, built = sysconfig.get_path("include"), folder / f"{name}{EXTENSION_SUFFIXES[0]}"
    if shutil.which("cc") is None or not source.exists() or not Path(headers, "Python.h").exists():
        pytest.skip("no compiler, no source, or no headers of Python")
    subprocess.run(["cc", *CHECKED, *flags, "-isystem", headers, source, "-o", built], check=True)
    spec = spec_from_file_location(name, built)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
