"""`outrider plan`: what a pair will need and give on two cards, from configurations and public card data alone."""
