"""Engines: the only places that know an engine."""
