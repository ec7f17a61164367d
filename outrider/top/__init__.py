"""`outrider top`: a coordinator at work, live in the terminal."""
