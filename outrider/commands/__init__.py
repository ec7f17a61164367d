"""The subcommands of `outrider` that start, ask and stop a stack on this machine, and fetch models."""
