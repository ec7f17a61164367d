"""Speculative decoding across separate devices, with the text that the target model alone would give."""

__version__ = "0.1.0"
