"""The command line: what its options do."""
