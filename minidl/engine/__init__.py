"""The engine: tensors, the tape, parameters in one flat vector, devices, random numbers, compilation of kernels."""
