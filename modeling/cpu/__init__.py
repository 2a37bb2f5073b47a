"""Hand-written CPU kernels, and every private name of torch that they use."""
