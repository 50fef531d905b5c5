"""Stepwell: a tiered KV-cache store for LLM serving that one can trust."""

__version__ = "0.1.0"
