"""Storage that people already have, below `stepwell.tiers.shared`: one module per kind."""
