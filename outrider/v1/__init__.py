"""Stubs that `make proto` writes from proto/outrider/v1; not edited by hand."""
