"""A run: its options, its folder, its checkpoints, its progress, and what a terminal shows."""
