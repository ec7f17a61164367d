"""The whole stack on this machine: `outrider up` plans it, starts it, watches it and takes it down."""
