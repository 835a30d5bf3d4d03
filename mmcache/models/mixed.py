"""Families that see and hear."""

from __future__ import annotations

from mmcache.models.entries import Family

__all__ = ["MIXED_FAMILIES"]

MIXED_FAMILIES: tuple[Family, ...] = ()
