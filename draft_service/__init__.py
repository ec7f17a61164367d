"""The draft service: proposes tokens for many decoding streams; knows tokens and distributions, no requests or text."""
