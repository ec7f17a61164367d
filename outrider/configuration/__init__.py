"""One YAML file for all parts: read with its line numbers, checked as a whole, shown with the origin of each value."""
