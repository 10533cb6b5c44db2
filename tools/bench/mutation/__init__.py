"""Mutants of the product: where they are, how they apply, which tests reach and kill them."""
