"""The command line: what its options do, and which job this process belongs to."""
