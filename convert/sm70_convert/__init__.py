"""sm70-convert: prepare MoE expert banks for Tesla V100 (SM70) runtimes once, offline."""

__version__ = "0.1.0"
