"""Measurements that run a real engine: the demo model, the server, the load and the report.

torch, transformers, aiohttp and vLLM are imported inside functions, so that importing this
package costs nothing and works where no engine is installed.
"""
