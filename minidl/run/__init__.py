"""A run: options, folder, checkpoints, progress, evaluation, signals and terminal output."""
