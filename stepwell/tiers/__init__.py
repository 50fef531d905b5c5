"""Tiers: one module per medium; each is a `stepwell.tiers.base.Tier` of five methods."""
