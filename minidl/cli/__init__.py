"""The command line: what its options do, and the detection of the job that started this process."""
