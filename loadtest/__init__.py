"""Load tests of OpenAI-compatible servers, and the sweep that finds where speculation stops paying.

Imports nothing but `outrider`: it sees a server as its clients do.
"""
