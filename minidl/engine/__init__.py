"""The engine: tensors, the tape, parameters in one vector, devices, and how kernels are compiled."""
