"""Getting weights onto this machine: from a hub, or from a package that carries them."""
