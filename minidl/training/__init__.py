"""Training: the loop, `fit`, a run of several replicas, and how it ends."""
