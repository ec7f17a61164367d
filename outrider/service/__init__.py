"""What the draft and the target service have in common: flags, life cycle, launch."""
