"""Merging embedding rows into the embeddings of a prompt, run by run."""

from mmcache.merge.embeddings import merge_embeddings
from mmcache.merge.plan import MergeLookup, MergePlan

__all__ = ["MergeLookup", "MergePlan", "merge_embeddings"]
