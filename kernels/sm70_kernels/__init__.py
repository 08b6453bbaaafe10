"""Kernels that turn checkpoint words into TurboMind SM70 bank words. Tensors in, tensors out: no file, no config."""
