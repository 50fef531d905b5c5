"""Stands in for the library of 3FS, which is on no package index."""
