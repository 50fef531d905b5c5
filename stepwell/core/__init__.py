"""Pure values: keys, roots, the on-storage record, jobs and results. No I/O."""
