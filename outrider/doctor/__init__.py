"""`outrider doctor`: what stands in a stack's way on this machine, before anything is started or downloaded."""
