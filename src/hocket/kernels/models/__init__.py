"""Models whose gradients are compiled: dense layers, sparse rows, factors."""
