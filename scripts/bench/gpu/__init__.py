"""Check on a CUDA machine."""
