"""Policies: pure deciders, run unchanged by the tiers and by simulators. No I/O, no clock."""
