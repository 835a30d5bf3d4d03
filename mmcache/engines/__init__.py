"""Engines that mmcache plugs into: a small one over transformers, and a connector for vLLM."""
