"""The target service: verifies drafted tokens of many streams, and decodes plainly where there are none."""
