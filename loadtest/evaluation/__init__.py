"""A candidate draft judged by what it does for its target: acceptance, costs, predicted and measured improvement."""
