"""One training step as a table of kernel calls: record, fuse, plan, replay."""
