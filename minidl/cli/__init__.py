"""The command line: what each option does, and which job this process is part of."""
